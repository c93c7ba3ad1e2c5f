"""Errors for forward derivatives by reverse mode where a backward is not linear in its cotangent.

The transpose of a gradient may be taken at any cotangent, because ``ct -> ct @ Df(x)`` is linear. Torch's own backwards
are linear. A backward of an `autograd.Function`, or a user's hook, may clip or normalise a gradient. Then the transpose
at one cotangent is not the one at others, and is zero where the gradient was clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from jtbridge._compat import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    custom_backwards,
    innermost,
    outside_modes,
    schema_of,
)
from jtbridge.core.pytree import tensor_leaves
from jtbridge.core.writes import returns_view, written_tensors
from jtbridge.errors import DifferentiationError

from ._derived import UntraceableBackwardError

Gradients = Sequence[torch.Tensor | None]

SMALL = 2.0**-8  # a cotangent of ones times this is rarely clipped

# Operators that are linear in all their tensors together.
_LINEAR = frozenset(
    {
        *("add", "sub", "rsub", "neg", "sum", "mean", "clone", "_to_copy", "cat", "stack", "cumsum", "flip", "roll"),
        *("tril", "triu", "repeat", "constant_pad_nd", "complex", "trace", "diag_embed", "_unsafe_view", "contiguous"),
        *("conj_physical", "_conj_physical", "lift_fresh", "lift_fresh_copy", "select_backward", "slice_backward"),
        *("copy",),
    }
)
# Operators that are linear in each of the arguments at some positions, if the others do not depend on the cotangent.
_LINEAR_IN_EACH: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("mul", "mm", "bmm", "mv", "dot", "convolution", "convolution_backward"), (0, 1)),
    **dict.fromkeys(("div", "index", "index_select", "gather", "masked_select", "_fft_r2c", "_fft_c2c"), (0,)),
    **dict.fromkeys(("copy", "where"), (1,)),
}
_CONSTANT = frozenset(
    {
        *("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full"),
        *("new_empty_strided", "zero", "fill", "rand_like", "randn_like", "is_same_size"),
    }
)
_ZERO = frozenset({"zeros_like", "new_zeros", "zeros"})


def may_be_nonlinear(outputs: Sequence[torch.Tensor], *, has_hooks: bool) -> bool:
    """Return whether a backward from some results runs user code, which may be nonlinear.

    Args:
        outputs: the results.
        has_hooks: whether hooks may have been registered in the graph.
    """
    return has_hooks or any(
        not node._forward_cls.__module__.startswith("jtbridge.") for node in custom_backwards(outputs)
    )


def linear_gradients(
    name: str, cotangents: Sequence[torch.Tensor], gradients: Callable[[Sequence[torch.Tensor]], Gradients]
) -> Gradients:
    """Return the gradients for some cotangents, or raise if the gradients are not linear in the cotangents.

    Real gradients are compared with those of small cotangents. Fake gradients must come from linear operators.

    Args:
        name: the name of the function, for messages.
        cotangents: the cotangents.
        gradients: computes the gradients.

    Raises:
        DifferentiationError: the gradients are not linear.
        UntraceableBackwardError: fake gradients come from an operator that may not be linear.
    """
    if any(isinstance(innermost(ct), FakeTensor) for ct in cotangents):
        with _NonlinearOperators(cotangents) as seen:
            found = gradients(cotangents)
        if seen.operator is not None:
            raise UntraceableBackwardError(f"{_nonlinearity_message(name)} ({seen.operator})")
        return found
    found = gradients(cotangents)
    refuse_nonlinear(name, found, gradients([ct.detach() * SMALL for ct in cotangents]))
    return found


def refuse_nonlinear(name: str, gradients: Gradients, of_small: Gradients) -> None:
    """Raise if the gradients of cotangents times `SMALL` are not the gradients times `SMALL`.

    Raises:
        DifferentiationError: the gradients are not linear in the cotangents.
    """
    with outside_modes(), torch.no_grad():
        for gradient, small in zip(gradients, of_small, strict=True):
            if gradient is None and small is None:
                continue
            if gradient is None or small is None or _differ(gradient, small / SMALL):
                raise DifferentiationError(_nonlinearity_message(name))


def _nonlinearity_message(name: str) -> str:
    return (
        f"`{name}` has no forward derivative: a backward of an autograd.Function in it, or a hook, is not linear in "
        "its cotangent, for example because it clips gradients, so its gradient is not the transpose of a derivative. "
        "Use reverse mode (`jax.grad`, `jax.jacrev`; `jax.jacrev` of a gradient in place of `jax.hessian`)."
    )


def _differ(x: torch.Tensor, y: torch.Tensor) -> bool:
    x, y = (innermost(t).detach().to_dense() for t in (x, y))
    if not x.numel():
        return False
    both = x.isfinite() & y.isfinite()
    x, y = torch.where(both, x, 0), torch.where(both, y, 0)
    tolerance = torch.finfo(x.dtype).eps ** 0.5  # a product with a power of two is exact
    return bool((x - y).abs().max() > tolerance * x.abs().max())


class _NonlinearOperators(TorchDispatchMode):
    """Mode that finds an operator that may not be linear in some tensors.

    Attributes:
        operator: the first operator that may not be linear in its arguments that depend on the tensors; None if there
            was none.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.operator: str | None = None
        self._dependent = {id(x): x for x in map(innermost, tensors)}  # kept alive: no other object gets their ids
        self._zeros: dict[int, torch.Tensor] = {}  # tensors that are zero everywhere

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        dependent = [self._depends(argument) for argument in args]
        name = schema_of(func).name.removeprefix("aten::").rstrip("_")
        written = written_tensors(func, args, kwargs)
        is_dependent = func.namespace != "prim" and name not in _CONSTANT and (any(dependent) or self._depends(kwargs))
        if is_dependent and self.operator is None and not self._is_linear(func, name, args, kwargs, dependent):
            self.operator = str(func)
        if is_dependent:
            self._dependent.update((id(tensor), tensor) for tensor in [*tensor_leaves(out), *written])
        if written:
            self._zeros.clear()  # any of them may share the memory
        if name in _ZERO or (returns_view(func) and args and id(args[0]) in self._zeros):
            self._zeros.update((id(tensor), tensor) for tensor in tensor_leaves(out))
        return out

    def _depends(self, value: Any) -> bool:
        return any(id(x) in self._dependent for x in tensor_leaves(value))

    def _is_linear(self, func: OpOverload, name: str, args: Sequence[Any], kwargs: Any, dependent: list[bool]) -> bool:
        # The backward of a custom operator is assumed to be linear.
        if returns_view(func) or func.namespace not in ("aten", "prims"):
            return True
        if name == "masked_fill" and dependent[0] and not any(dependent[1:]):
            return not isinstance(args[2], torch.Tensor) and args[2] == 0
        if name == "copy" and id(args[1]) in self._zeros:
            return True
        places = [i for i, is_dependent in enumerate(dependent) if is_dependent]
        linear_in = (*_LINEAR_IN_EACH.get(name, ()), *_cotangents_of(func, name))
        if len(places) == 1 and places[0] in linear_in and not self._depends(kwargs):
            return True
        return name in _LINEAR and all(id(x) in self._dependent for x in tensor_leaves((args, kwargs)))


def _cotangents_of(func: OpOverload, name: str) -> list[int]:
    """Return the positions of the cotangents of torch's derivative operators, such as ``elu_backward``."""
    if not name.endswith(("_backward", "_backward_data")):
        return []
    return [i for i, argument in enumerate(schema_of(func).arguments) if argument.name.startswith("grad")]
