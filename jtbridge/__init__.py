"""jtbridge: any PyTorch function as a JAX function.

``@jtbridge.wrap`` is the one to start with. See :mod:`jtbridge.errors` for everything that is raised.
"""

from . import errors
from ._check import CheckReport, check
from ._config import config
from ._convert import to_jax, to_torch
from ._explain import Explanation, explain
from ._export import export
from ._wrap import wrap
from .backends import BackendStatus, backends
from .lowerings import register_lowering

__all__ = [
    "BackendStatus",
    "CheckReport",
    "Explanation",
    "backends",
    "check",
    "config",
    "errors",
    "explain",
    "export",
    "register_lowering",
    "to_jax",
    "to_torch",
    "wrap",
]
__version__ = "0.1.0"
