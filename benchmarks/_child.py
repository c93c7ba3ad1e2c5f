"""`python -m benchmarks._child MODULE.FUNCTION ARGS`: run one measurement in its own process, and print JSON."""

import importlib
import json
import sys

module, function = sys.argv[1].split(".")
result = getattr(importlib.import_module(f"benchmarks.{module}"), function)(*json.loads(sys.argv[2]))
print(json.dumps(result))
