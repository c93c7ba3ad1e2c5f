"""jtbridge: any PyTorch function as a JAX function.

``@jtbridge.wrap`` is the one to start with. See :mod:`jtbridge.errors` for everything that is raised.
"""

from . import errors
from ._config import config
from ._convert import to_jax, to_torch
from ._wrap import wrap
from .backends import BackendStatus, backends

__all__ = ["BackendStatus", "backends", "config", "errors", "to_jax", "to_torch", "wrap"]
__version__ = "0.1.0"
