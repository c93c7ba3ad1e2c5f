"""jtbridge: any PyTorch function as a JAX function.

Start with ``@jtbridge.wrap``. :mod:`jtbridge.errors` lists all exceptions and warnings.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import errors
from ._config import config
from ._wrap import wrap
from .backends import BackendStatus, backends

if TYPE_CHECKING:
    from . import kernels as kernels
    from ._check import CheckReport, check
    from ._convert import to_jax, to_torch
    from ._explain import Explanation, explain
    from ._export import export
    from ._purity import PurityReport, purity
    from .lowerings import register_lowering

__all__ = [
    "BackendStatus",
    "CheckReport",
    "Explanation",
    "PurityReport",
    "backends",
    "check",
    "config",
    "errors",
    "explain",
    "export",
    "purity",
    "register_lowering",
    "to_jax",
    "to_torch",
    "wrap",
]
__version__ = "0.1.0"

# These names are imported on first use: an eager call needs none of them, and their import takes longer than the call.
_MODULES = {
    "CheckReport": "_check",
    "Explanation": "_explain",
    "PurityReport": "_purity",
    "check": "_check",
    "explain": "_explain",
    "export": "_export",
    "purity": "_purity",
    "register_lowering": "lowerings",
    "to_jax": "_convert",
    "to_torch": "_convert",
}


def __getattr__(name: str) -> Any:
    if name == "kernels":
        return importlib.import_module(".kernels", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "kernels"})
