"""Imports that an interrupt by the user does not break off."""

from __future__ import annotations

import importlib
import sys

from jtbridge._compat import on_own_thread


def import_whole(*names: str) -> None:
    """Import modules by name, in a thread of their own if need be. Exceptions are left to the import that follows.

    An import of sympy or of torch's compiler that Ctrl-C breaks off leaves modules that fail in every later use. The
    interrupt reaches the main thread alone, so the import goes on while the main thread raises it.
    """
    if any(name not in sys.modules for name in names):
        on_own_thread(lambda: _import(names))


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001  (raised again where it can be caught)
            return
