"""The ways to run a torch function inside a JAX program, one file each."""

from ._base import Backend, BackendStatus
from ._callback import call_on_host, numpy_callback
from ._registry import backends, check_name, choose, refusals, translates

__all__ = [
    "Backend",
    "BackendStatus",
    "backends",
    "call_on_host",
    "check_name",
    "choose",
    "numpy_callback",
    "refusals",
    "translates",
]
