"""Imports that Ctrl-C does not interrupt halfway."""

from __future__ import annotations

import importlib
import sys

from jtbridge._compat import on_own_thread


def import_whole(*names: str) -> None:
    """Import modules by name on a separate thread, unless all are imported. Errors are left to the caller's own import.

    If Ctrl-C interrupts an import of sympy or of torch's compiler, these modules fail in every later use. The interrupt
    reaches only the main thread, so the import on the other thread continues while the main thread raises.
    """
    if any(name not in sys.modules for name in names):
        on_own_thread(lambda: _import(names))


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001  (raised again where it can be caught)
            return
