"""Compares architectures, and prints a line of JSON for each. Arguments: seconds for an architecture, and the names."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import sys
import time
import warnings

from .comparison import compare
from .table import ROWS


def main(seconds: float, names: list[str]) -> None:
    """Compare architectures one after another; end the process if one takes longer than `seconds`."""
    sys.modules["fla"] = None  # type: ignore[assignment]  (where it is installed, transformers needs a GPU for it)
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for name in names:
        faulthandler.dump_traceback_later(seconds, exit=True)
        sys.stdout.write(json.dumps({"started": name}) + "\n")
        sys.stdout.flush()
        start = time.monotonic()
        result = dataclasses.asdict(compare(name, ROWS[name]))
        sys.stdout.write(json.dumps({**result, "seconds": time.monotonic() - start}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
