"""jtbridge: any PyTorch function as a JAX function.

Start with ``@jtbridge.wrap``. :mod:`jtbridge.errors` lists all exceptions and warnings.
"""

import sys
from typing import TYPE_CHECKING, Any

from . import errors
from ._backends import BackendStatus, backends
from .calls import config, wrap
from .core.imports import import_whole
from .core.version import __version__ as __version__

if TYPE_CHECKING:
    from . import kernels as kernels
    from ._export import export
    from .core.convert import to_jax, to_torch
    from .diagnosis import DoctorReport, Finding, ProofReport, doctor, prove
    from .lowerings import register_lowering
    from .models import (
        JaxModule,
        TrainState,
        TrainStep,
        generate,
        module,
        shard,
        shard_batch,
        shardings,
        train_step,
    )
    from .reports._check import CheckReport, check
    from .reports._explain import Explanation, explain
    from .reports._purity import PurityReport, purity
    from .reverse import to_torch_function, to_torch_module

__all__ = [
    "BackendStatus",
    "CheckReport",
    "DoctorReport",
    "Explanation",
    "Finding",
    "JaxModule",
    "ProofReport",
    "PurityReport",
    "TrainState",
    "TrainStep",
    "backends",
    "check",
    "config",
    "doctor",
    "errors",
    "explain",
    "export",
    "generate",
    "module",
    "prove",
    "purity",
    "register_lowering",
    "shard",
    "shard_batch",
    "shardings",
    "to_jax",
    "to_torch",
    "to_torch_function",
    "to_torch_module",
    "train_step",
    "wrap",
]

# These names are imported on first use: an eager call needs none of them, and their import takes longer than the call.
_MODULES = {
    "CheckReport": "reports._check",
    "DoctorReport": "diagnosis",
    "Explanation": "reports._explain",
    "Finding": "diagnosis",
    "JaxModule": "models",
    "ProofReport": "diagnosis",
    "PurityReport": "reports._purity",
    "TrainState": "models",
    "TrainStep": "models",
    "check": "reports._check",
    "doctor": "diagnosis",
    "explain": "reports._explain",
    "export": "_export",
    "generate": "models",
    "module": "models",
    "prove": "diagnosis",
    "purity": "reports._purity",
    "register_lowering": "lowerings",
    "shard": "models",
    "shard_batch": "models",
    "shardings": "models",
    "to_jax": "core.convert",
    "to_torch": "core.convert",
    "to_torch_function": "reverse",
    "to_torch_module": "reverse",
    "train_step": "models",
}


def __getattr__(name: str) -> Any:
    if name not in (*_MODULES, "kernels"):
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    module = f"{__name__}.{_MODULES.get(name, name)}"
    import_whole(module)
    value = sys.modules[module] if name == "kernels" else getattr(sys.modules[module], name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "kernels"})
