"""Tests whether a model that branches on fake tensors gives the same results on both branches.

Models of the library `transformers` test whether a mask is fake. If it is not, the model reads the mask and may leave
it out. Both branches are compared on example arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from jtbridge._compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    forget_tensors,
    treated_as_fake,
)
from jtbridge.core import random_numbers
from jtbridge.core.pytree import flatten_output
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.core.static import value_key
from jtbridge.errors import JtbridgeError
from jtbridge.triton import intercepted_launches

from ._abstract import run_on_values
from ._examples import EXAMPLES, Example
from ._request import TraceRequest
from .modes.higher_order import HigherOrderInOperators
from .rewrites.grouped_mm import GroupedProducts

Result = TypeVar("Result")


def differs_if_fake(request: TraceRequest) -> bool:
    """Return whether a model that tests if tensors are fake gives other results if they are, on example arguments."""
    if request.ordered:
        return False
    return any(not _same_operators(request, example) and _different_results(request, example) for example in EXAMPLES)


def _different_results(request: TraceRequest, example: Example) -> bool:
    """Return whether runs on values, with and without tensors reported as fake, both succeed and differ."""
    types = zip(request.shapes, request.dtypes, strict=True)
    inputs = [example(shape, dtype=dtype, device=request.device) for shape, dtype in types]

    def run() -> list[torch.Tensor]:
        out, _ = run_on_values(request, inputs)
        return [leaf for leaf in flatten_output(out)[0] if isinstance(leaf, torch.Tensor)]

    found = _both_ways(request, run)
    return found is not None and not all(map(_nearly_equal, *found))


def _both_ways(request: TraceRequest, run: Callable[[], Result]) -> tuple[Result, Result] | None:
    """Run the function twice: with no tensor reported to transformers as fake, and with every tensor reported as fake.

    Returns:
        Both results. None if a run fails, for example because the function does not accept the example arguments.
    """
    try:
        plain = request.guard.run(run)
        with treated_as_fake():
            return plain, request.guard.run(run)
    except JtbridgeError:
        raise
    except Exception as error:  # noqa: BLE001  (whatever the user's function raises)
        raise_if_from_signal(error)
        return None


def _nearly_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two results differ by rounding alone."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    allowed = max(1e-4, 30 * torch.finfo(a.dtype).eps)
    a, b = a.detach(), b.detach()
    scale = float(a[a.isfinite()].abs().max()) if bool(a.isfinite().any()) else 1.0
    return torch.allclose(a, b, rtol=allowed, atol=allowed * scale, equal_nan=True)


# --- the same comparison without the cost of the model -------------------------------------------------------------


def _same_operators(request: TraceRequest, example: Example) -> bool:
    """Return whether the function runs the same operators on floats if all tensors are reported as fake.

    Return False if this is not known. Integers and bools have values, so that masks are computed. Floats are fake, so
    that nothing large is computed.
    """
    logs = _both_ways(request, lambda: _logged(request, example))
    return logs is not None and logs[0].same_as(logs[1])


def _logged(request: TraceRequest, example: Example) -> _FakeOperators:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    log = _FakeOperators()
    try:
        with random_numbers.seeded_by(0, 0), request.state.applied(), intercepted_launches():
            tensors = []
            for shape, dtype in zip(request.shapes, request.dtypes, strict=True):
                is_fake = dtype.is_floating_point or dtype.is_complex
                with mode if is_fake else contextlib.nullcontext():
                    tensors.append((torch.empty if is_fake else example)(shape, dtype=dtype, device=request.device))
            with GroupedProducts(), log, _MaskRecordingMode(log), HigherOrderInOperators():
                out = request.call(*tensors)
        log.entries.append(log.key(tuple(flatten_output(out)[0])))
    finally:
        forget_tensors(mode)
    return log


class _FakeOperators(TorchDispatchMode):
    """Logs the operators that have a fake tensor among their arguments.

    Attributes:
        entries: the operators with their arguments: fake tensors by number, other tensors by value.
        masks: for each attention call without a mask or with a bool mask, the keys that each query may attend to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Any] = []
        self.masks: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._keep: list[torch.Tensor] = []  # Python may reuse an id once its object is gone

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if any(issubclass(type_, FakeTensor) for type_ in types):
            self.entries.append((func, self.key(args), self.key(kwargs)))
            self.key(out)
        return out

    def same_as(self, other: _FakeOperators) -> bool:
        """Return whether two logs are of the same computation."""
        return (
            self.entries == other.entries
            and len(self.masks) == len(other.masks)
            and all(map(_same_mask, self.masks, other.masks))
        )

    def key(self, value: Any) -> Any:
        """Return an object that is equal for equal arguments."""
        if isinstance(value, FakeTensor):
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self._numbers)
                self._keep.append(value)
            return "fake", self._numbers[id(value)]
        if isinstance(value, torch.nn.Parameter):
            return "parameter", id(value)
        if isinstance(value, torch.Tensor):
            self._keep.append(value)
            return "value", value.dtype, tuple(value.shape), _Values(value)
        if isinstance(value, list | tuple):
            return type(value), tuple(map(self.key, value))
        if isinstance(value, dict):
            return dict, tuple((name, self.key(item)) for name, item in value.items())
        return value_key(value)


class _Values:
    """The values of a tensor, which are read only when two logs are compared."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Values):
            return NotImplemented
        return self._tensor is other._tensor or torch.equal(self._tensor, other._tensor)

    __hash__ = None  # type: ignore[assignment]


class _MaskRecordingMode(TorchFunctionMode):
    """Records the mask of each attention call, and removes it from the call.

    The two branches may pass the same causal mask in two forms: as ``attn_mask`` and as ``is_causal``.
    """

    def __init__(self, log: _FakeOperators):
        super().__init__()
        self._log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention and len(args) == 3:
            mask = _bool_mask(args[0].shape[-2], args[1].shape[-2], kwargs.get("attn_mask"), kwargs.get("is_causal"))
            if mask is not None:
                self._log.masks.append(mask)
                kwargs |= {"attn_mask": None, "is_causal": False}
        return func(*args, **kwargs)


def _bool_mask(queries: int, keys: int, mask: Any, is_causal: Any) -> torch.Tensor | None:
    """Return the mask of the keys that each query may attend to; None if it is not known as bools.

    It is not known if `mask` is fake, has another dtype, or is combined with `is_causal`.
    """
    if mask is None:
        everything = torch.ones(queries, keys, dtype=torch.bool)
        return everything.tril() if is_causal else everything
    if isinstance(mask, FakeTensor) or mask.dtype is not torch.bool or is_causal:
        return None
    return mask


def _same_mask(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        return torch.equal(*torch.broadcast_tensors(a, b))
    except RuntimeError:  # the shapes do not fit
        return False
