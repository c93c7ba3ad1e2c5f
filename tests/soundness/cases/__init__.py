"""The cases, a file for each section. Importing this package imports all files, which fills `CASES`."""

from __future__ import annotations

import importlib
import pkgutil

from ._case import CASES as CASES
from ._case import Case as Case

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
