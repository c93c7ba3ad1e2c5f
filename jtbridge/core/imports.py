"""Imports that Ctrl-C does not interrupt halfway."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Callable, Iterator

from jtbridge._compat import on_own_thread


def import_whole(*names: str) -> None:
    """Import modules by name as :func:`run_imports` does, unless all are imported."""
    if any(name not in sys.modules for name in names):
        run_imports(lambda: [importlib.import_module(name) for name in names])


def run_imports(function: Callable[[], object]) -> None:
    """Run a function that imports modules on a separate thread.

    If Ctrl-C interrupts an import of sympy or of torch's compiler, these modules fail in every later use. Modules that
    register operators or lowerings would register them twice. The interrupt reaches only the main thread, so the
    imports continue while the main thread raises.
    """

    def run() -> None:
        with _paused_garbage_collector():
            function()

    on_own_thread(run)


@contextlib.contextmanager
def _paused_garbage_collector() -> Iterator[None]:
    """Pause Python's garbage collector, which takes a quarter of the time of an import of torch's compiler."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
