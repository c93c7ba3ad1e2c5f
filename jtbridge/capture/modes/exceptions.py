"""Detection of exceptions that a function catches while it is traced.

``try: s = float(x.sum())`` with ``except Exception: s = 0.`` takes the `except` branch in a trace, because a tensor has
no value there, and the `try` branch in torch. If a function continues after such an exception, its trace may differ
from its run in torch, so the trace is not used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import (
    FakeTensor,
    HigherOrderOperator,
    TorchDispatchMode,
    exports_to_dlpack_seen,
    is_tracing_exception,
)
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.errors import JtbridgeError, TranslationError


@contextlib.contextmanager
def reraise_caught_exceptions() -> Iterator[None]:
    """Raise, at the end of the block, the first exception of torch or jtbridge that was raised and caught inside.

    An exception that only tracing raises has priority over the others. It also replaces an exception that ends the
    block, other than a `JtbridgeError`.
    """
    raised = _Raised()
    try:
        with _OperatorExceptionMode(raised), _CallExceptionMode(raised), exports_to_dlpack_seen(_refuse_exposure):
            yield
    except Exception as error:
        raise_if_from_signal(error)
        if raised.by_tracing is not None and raised.by_tracing is not error and not isinstance(error, JtbridgeError):
            raise raised.by_tracing from error
        raise
    if raised.by_tracing is not None:
        raise raised.by_tracing
    if raised.by_torch is not None:
        raise raised.by_torch


class _Raised:
    """The first exception of each kind that left a call of torch."""

    def __init__(self) -> None:
        self.by_tracing: Exception | None = None  # only tracing raises it: a value is needed, or a write is refused
        self.by_torch: Exception | None = None  # torch may raise it outside a trace, too

    def note(self, error: Exception) -> None:
        if is_tracing_exception(error) or isinstance(error, JtbridgeError):
            self.by_tracing = self.by_tracing or error
        else:
            self.by_torch = self.by_torch or error


def refuse_higher_order(operator: Any) -> None:
    """Raise for a higher-order operator, which torch cannot trace inside a mode."""
    if isinstance(operator, HigherOrderOperator):
        raise TranslationError(
            f"`{operator}` is an operator that takes functions, and is not supported under `jit` or in another trace. "
            'Call the wrapped function eagerly, or with `effects="ordered"` and `output_shapes=`; or combine wrapped '
            "functions by `jax.lax.cond`, `jax.lax.while_loop` or `jax.lax.scan`."
        )


_DEVICE = torch.ops.prim.device.default


class _OperatorExceptionMode(TorchDispatchMode):
    """Records the exceptions of operators that only tracing raises; torch's own Python code may catch others."""

    supports_higher_order_operators = True

    def __init__(self, raised: _Raised):
        super().__init__()
        self._raised = raised

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # More than half of all dispatches of a trace ask for a device. The other modes need not see them.
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        try:
            refuse_higher_order(func)
            return func(*args, **(kwargs or {}))
        except Exception as error:
            if is_tracing_exception(error) or isinstance(error, JtbridgeError):
                self._raised.note(error)
            raise


class _CallExceptionMode(TorchFunctionMode):
    """Records exceptions of torch functions that user code calls, including ``Tensor.numpy``, which has no operator."""

    def __init__(self, raised: _Raised):
        super().__init__()
        self._raised = raised

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            if func in _EXPOSING:
                _refuse_exposure(args[0])
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self._raised.note(error)
            raise


# For a fake tensor, these return the null pointer, or memory at address 0, and reading it crashes the process.
_EXPOSING = frozenset(
    getattr(torch.Tensor, name)
    for name in ("data_ptr", "const_data_ptr", "is_set_to", "__dlpack__")
    if hasattr(torch.Tensor, name)
)


def _refuse_exposure(tensor: torch.Tensor) -> None:
    """Raise for access to the memory of a tensor that has none."""
    if isinstance(tensor, FakeTensor):
        raise RuntimeError("it needs the memory of a tensor, which has none while the function is traced")
