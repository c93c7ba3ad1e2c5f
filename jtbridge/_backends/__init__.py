"""The backends: the ways to run a torch function inside a JAX program, one file each.

The files of the backends are imported on first use, to keep ``import jtbridge`` fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._lazy_registry import backends, called_device, check_name, may_use_kernels, translates, uses_kernels
from ._status import BackendStatus

if TYPE_CHECKING:
    from ._base import Backend
    from ._dlpack_gpu import order_after_current_streams
    from ._registry import calling, choose_backend, may_have_islands, portable, unsupported_reasons
    from .callback import call_on_host, numpy_callback

# The names that are imported on first use, and their files.
_FILES = {
    "Backend": "_base",
    "call_on_host": "callback",
    "numpy_callback": "callback",
    "order_after_current_streams": "_dlpack_gpu",
    **dict.fromkeys(("calling", "choose_backend", "may_have_islands", "portable", "unsupported_reasons"), "_registry"),
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    return getattr(importlib.import_module(f".{_FILES[name]}", __name__), name)
