"""Derived functions: derivatives and batches of torch functions, taken by torch, and closed under composition.

Each derived function is a :class:`TorchFunction` made from another one, so ``Vmap(Vjp(f))`` or ``Vjp(Vjp(f))`` need no
rule of their own. Derived functions follow JAX's conventions: a cotangent of a complex array is the conjugate of
torch's, since JAX transposes without conjugating (https://docs.jax.dev/en/latest/notebooks/autodiff_cookbook.html).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._batch_statistics import DifferentiableStatistics, is_refusal
from ._compat import differentiating, inside_functorch, once_differentiable_in, reentrant_checkpoints
from ._composite import CompositeNorms
from ._dtypes import torch_dtype
from ._functions import ArrayType, Tensors, TorchFunction, TracedFunction
from ._nesting import marked
from ._torch_state import TorchState
from ._vmap_guard import VmapGuard
from .errors import DifferentiationError
from .triton import intercepted_launches

# Torch has one forward-mode level per process, so two threads cannot be inside it at once.
_FORWARD_MODE = threading.RLock()


@dataclasses.dataclass(frozen=True)
class _Derived(TorchFunction):
    fn: TorchFunction

    @property
    def base(self) -> TracedFunction:
        return self.fn.base

    @property
    def state(self) -> TorchState:
        return self.base.trace_state.differentiable()

    @property
    def order(self) -> int:
        return self.fn.order + 1


@dataclasses.dataclass(frozen=True)
class Vjp(_Derived):
    """Vector-Jacobian product ``(x, ct) -> ct @ Df(x)`` for the inputs `wrt` and the outputs `outs`.

    It is computed by torch's reverse mode.
    """

    wrt: tuple[int, ...]
    outs: tuple[int, ...]

    @property
    def in_types(self) -> tuple[ArrayType, ...]:  # type: ignore[override]
        return self.fn.in_types + tuple(self.fn.out_types[o] for o in self.outs)

    @property
    def out_types(self) -> tuple[ArrayType, ...]:  # type: ignore[override]
        return tuple(self.fn.in_types[i] for i in self.wrt)

    @marked
    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        refuse_once_differentiable(self.base, self.order)
        count = len(self.fn.in_types)
        primals, cotangents = tensors[:count], [conjugate(ct) for ct in tensors[count:]]
        with differentiable_norms(self), intercepted_launches():  # a backward may launch kernels of its own
            if inside_functorch():
                grads = self._by_functorch(primals, cotangents)
            else:
                grads = self.by_autograd(primals, cotangents)[1]
        return tuple(conjugate(grad) for grad in grads)

    @marked
    def by_autograd(
        self,
        primals: Tensors,
        cotangents: Sequence[torch.Tensor],
        around: contextlib.AbstractContextManager[Any] | None = None,
    ) -> tuple[Tensors, Tensors]:
        """Return results and gradients (torch's convention) by plain autograd, which every torch function supports.

        The gradients can be differentiated again if a primal or a cotangent requires grad. `around` is active while the
        function runs, and not while it is differentiated.
        """
        again = torch.is_grad_enabled() and any(t.requires_grad for t in (*primals, *cotangents))
        with torch.enable_grad():
            inputs = list(primals)
            for i in self.wrt:
                x = primals[i]
                # A new tensor, even if the same array was passed twice; part of the outer graph, if there is one.
                inputs[i] = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
            with around or contextlib.nullcontext():
                results = self._results(inputs)
            pairs = [(results[o], ct) for o, ct in zip(self.outs, cotangents, strict=True) if results[o].requires_grad]
            if again and self.base.traits.untraceable:  # traceable functions were examined before they run
                self.base.once_differentiable = once_differentiable_in([y for y, _ in pairs])
                refuse_once_differentiable(self.base, 2)
            if not pairs:
                return results, tuple(torch.zeros_like(primals[i]) for i in self.wrt)
            differentiated = [inputs[i] for i in self.wrt]
            extra = reentrant_checkpoints([y for y, _ in pairs], differentiated)
            grads = torch.autograd.grad(
                [y for y, _ in pairs], differentiated, [ct for _, ct in pairs], create_graph=again, allow_unused=True
            )
            found = [[_dense(part) for part in parts if part is not None] for parts in zip(grads, extra, strict=True)]
            grads = tuple(
                sum(parts[1:], parts[0]) if parts else torch.zeros_like(primals[i])
                for i, parts in zip(self.wrt, found, strict=True)
            )
        return results, grads

    def _results(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        traced = self.base
        if not traced.differentiable_statistics:
            try:
                return self.fn(*inputs)
            except RuntimeError as error:
                if not is_refusal(error):
                    raise
                traced.differentiable_statistics = True
        with DifferentiableStatistics():
            return self.fn(*inputs)

    def _by_functorch(self, primals: Tensors, cotangents: Sequence[torch.Tensor]) -> Tensors:
        """Return the gradients by torch.func, for calls under torch.vmap or torch.func.jvp.

        Plain autograd does not work under these transforms.
        """

        of_wrt = _of_differentiated(self, primals)
        pullback = torch.func.vjp(of_wrt, *(primals[i] for i in self.wrt))[1]
        return pullback(tuple(cotangents))


_MOST_OF_JACOBIAN = 1 << 24  # elements
_UNITS = (1, 1j)  # the real part of (1j * dy) is minus the imaginary part of dy


@dataclasses.dataclass(frozen=True)
class Jvp(_Derived):
    """Jacobian-vector product ``(x, dx) -> Df(x) @ dx`` for the inputs `wrt` and the outputs `outs`.

    The product is computed by two reverse modes: the transpose in ``ct`` of ``ct -> ct @ Df(x)``, which follows every
    rule that the gradient follows. For a first derivative of torch's own operators, torch's forward mode is used, which
    is faster and right there. Elsewhere torch's forward mode is silently wrong (torch 2.13): it ignores `no_grad`,
    drops the tangents of custom operators, and its formulas for layer_norm, linalg.solve and others cannot be
    differentiated again.
    """

    wrt: tuple[int, ...]
    outs: tuple[int, ...]

    @property
    def in_types(self) -> tuple[ArrayType, ...]:  # type: ignore[override]
        return self.fn.in_types + tuple(self.fn.in_types[i] for i in self.wrt)

    @property
    def out_types(self) -> tuple[ArrayType, ...]:  # type: ignore[override]
        return tuple(self.fn.out_types[o] for o in self.outs)

    @marked
    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        if not self._may_use_forward_mode(tensors):
            with differentiable_norms(self):
                return self.by_reverse_mode(tensors)
        try:
            return self._by_forward_mode(tensors)
        except Exception as error:  # noqa: BLE001  (if the function is at fault the other way raises it too)
            try:
                result = self.by_reverse_mode(tensors)
            except Exception as other:
                raise other from error
            self.base.double_reverse.add(self)
            return result

    def _may_use_forward_mode(self, tensors: Tensors) -> bool:
        traits = self.base.traits
        return not (
            self in self.base.double_reverse
            or self.fn.order > 0
            or traits.autograd.switches_grad_mode
            or traits.autograd.uses_data
            or traits.autograd.inner_autograd
            or traits.custom_operator
            or traits.autograd.zero_tangent
            or traits.untraceable  # no trace has shown whether forward mode agrees with the gradient
            or self.base.reads_graph
            or differentiating()
            or any(tensor.requires_grad for tensor in tensors)
        )

    def _by_forward_mode(self, tensors: Tensors) -> Tensors:
        count = len(self.fn.in_types)
        primals, tangents = tensors[:count], tensors[count:]

        of_wrt = _of_differentiated(self, primals)
        # The locks of modules are taken first: a thread that traces already holds them here.
        with self.base.locked(), _FORWARD_MODE:
            return torch.func.jvp(of_wrt, tuple(primals[i] for i in self.wrt), tuple(tangents))[1]

    def by_reverse_mode(self, tensors: Tensors) -> Tensors:
        """Compute the product by two reverse modes, or by the rows of the Jacobian.

        The rows are used if torch cannot differentiate a gradient.
        """
        try:
            return self._by_two_vjps(tensors)
        except RuntimeError as error:
            if isinstance(error, DifferentiationError) or "is not implemented" not in str(error):
                raise
            return self._by_rows(tensors, error)

    def _by_rows(self, tensors: Tensors, cause: RuntimeError) -> Tensors:
        """Compute every element of ``Df(x) @ dx`` as the product of a gradient and dx.

        No derivative of a gradient is needed. Torch's forward mode would not need one either, but it is wrong in the
        cases that :class:`Jvp` lists.
        """
        count = len(self.fn.in_types)
        primals, tangents = tensors[:count], tensors[count:]
        pullback = Vjp(self.fn, self.wrt, self.outs)
        rows = sum(math.prod(type_.shape) for type_ in self.out_types)
        if rows * sum(t.numel() for t in tangents) > _MOST_OF_JACOBIAN:
            lines = str(cause).strip().splitlines()
            raise DifferentiationError(
                f"`{self.base.name}` has no forward mode: torch cannot differentiate a gradient in it ({lines[0]}), "
                "and its Jacobian is too large to compute. Use reverse mode, or other operators."
            ) from cause

        def product(*cotangents: torch.Tensor) -> torch.Tensor:
            gradients = pullback(*primals, *cotangents)
            products = [torch.real(g * dx).sum() for g, dx in zip(gradients, tangents, strict=True)]
            return sum(products[1:], products[0])

        def products(units: Sequence[torch.Tensor]) -> torch.Tensor:
            try:
                return torch.func.vmap(product)(*units)
            except RuntimeError:  # torch has no batching rule
                return torch.stack([product(*(unit[i] for unit in units)) for i in range(len(units[0]))])

        zeros = [
            torch.zeros(type_.shape, dtype=torch_dtype(type_.dtype, "a cotangent"), device=tensors[0].device)
            for type_ in self.out_types
        ]
        results = []
        for number, zero in enumerate(zeros):
            if not zero.numel():
                results.append(zero)
                continue
            unit = torch.eye(zero.numel(), dtype=zero.dtype, device=zero.device).reshape(-1, *zero.shape)
            batch = [other.expand(len(unit), *other.shape) for other in zeros]
            parts = [
                products([*batch[:number], factor * unit, *batch[number + 1 :]])
                for factor in _UNITS[: 1 + zero.is_complex()]
            ]
            result = torch.complex(parts[0], -parts[1]) if zero.is_complex() else parts[0]
            results.append(result.reshape(zero.shape).to(zero.dtype))
        return tuple(results)

    def _by_two_vjps(self, tensors: Tensors) -> Tensors:
        refuse_once_differentiable(self.base, 2)
        count = len(self.fn.in_types)
        primals, tangents = tensors[:count], tensors[count:]
        pullback = Vjp(self.fn, self.wrt, self.outs)
        transpose = Vjp(pullback, tuple(range(count, count + len(self.outs))), tuple(range(len(self.wrt))))
        # The pullback is linear in the cotangent, so it may be differentiated at any cotangent. Zero is excluded: the
        # backward of logcumsumexp takes the logarithm of the cotangent, whose derivative is NaN at zero.
        anywhere = [
            torch.ones(type_.shape, dtype=torch_dtype(type_.dtype, "a cotangent"), device=tensors[0].device)
            for type_ in self.out_types
        ]
        return transpose(*primals, *anywhere, *tangents)


@dataclasses.dataclass(frozen=True)
class Vmap(_Derived):
    """`fn` over a batch of `size` rows in one call.

    `dims` holds the batch axis of each input, None for an input without one. Results have the batch axis first, except
    the results at the positions `summed`, which are summed over the batch.
    """

    dims: tuple[int | None, ...]
    size: int
    summed: tuple[int, ...] = ()

    @property
    def in_types(self) -> tuple[ArrayType, ...]:  # type: ignore[override]
        return tuple(
            type_ if dim is None else _with_axis(type_, dim, self.size)
            for type_, dim in zip(self.fn.in_types, self.dims, strict=True)
        )

    @property
    def out_types(self) -> tuple[ArrayType, ...]:  # type: ignore[override]
        return tuple(
            type_ if i in self.summed else _with_axis(type_, 0, self.size) for i, type_ in enumerate(self.fn.out_types)
        )

    @property
    def state(self) -> TorchState:
        return self.fn.state

    @property
    def order(self) -> int:
        return self.fn.order

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        rows = self._rows(tensors)
        return tuple(y.sum(0, dtype=y.dtype) if i in self.summed else y for i, y in enumerate(rows))

    def _rows(self, tensors: Tensors) -> Tensors:
        if self.size == 0:
            return self._empty(tensors)
        traits = self.base.traits
        if (
            self in self.base.sequential
            or traits.unbatchable
            or (self.base.reads_graph and self.order > 0)  # inside torch.func a weight does not require a gradient
            or (traits.autograd.uses_data and self.order > 0)  # inside torch.func, `.data` does not detach a tensor
        ):
            return self.by_loop(tensors)
        try:
            return self.by_torch_vmap(tensors)
        except Exception:  # noqa: BLE001
            # If a row fails by itself, the loop raises the real error.
            result = self.by_loop(tensors)
            self.base.sequential.add(self)
            return result

    def by_torch_vmap(self, tensors: Tensors) -> Tensors:
        """Run all rows by one call of torch.vmap, which raises if it cannot batch the function."""
        # randomness="same": a key that is not batched draws the same numbers for every row, as in JAX.
        with VmapGuard(tensors, self.dims):
            return torch.func.vmap(self.fn.__call__, in_dims=self.dims, randomness="same")(*tensors)

    def by_loop(self, tensors: Tensors) -> Tensors:
        """Run the rows one after another, which is right for every function."""
        # A row is copied to memory of its own: as_strided and similar operators count from the start of the memory.
        rows = [
            self.fn(*(t if d is None else t.select(d, i).clone() for t, d in zip(tensors, self.dims, strict=True)))
            for i in range(self.size)
        ]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))

    def _empty(self, tensors: Tensors) -> Tensors:
        device = tensors[0].device
        return tuple(
            torch.empty((0, *type_.shape), dtype=torch_dtype(type_.dtype, "a result"), device=device)
            for type_ in self.fn.out_types
        )


def of_results(transpose: TorchFunction, used: Sequence[int]) -> TorchFunction:
    """Restrict a vector-Jacobian product, batched or not, to the cotangents of some results.

    `used` holds the positions of these results among the results that the product takes cotangents of.
    """
    if isinstance(transpose, Vmap):
        inner = of_results(transpose.fn, used)
        count = len(transpose.dims) - _cotangents(transpose)
        dims = (*transpose.dims[:count], *(transpose.dims[count + i] for i in used))
        return dataclasses.replace(transpose, fn=inner, dims=dims)
    assert isinstance(transpose, Vjp)
    return dataclasses.replace(transpose, outs=tuple(transpose.outs[i] for i in used))


def _cotangents(transpose: TorchFunction) -> int:
    """Return the number of cotangents that a vector-Jacobian product, batched or not, takes."""
    while isinstance(transpose, Vmap):
        transpose = transpose.fn
    assert isinstance(transpose, Vjp)
    return len(transpose.outs)


def differentiable_norms(fn: TorchFunction) -> contextlib.AbstractContextManager:
    """Write normalisations out inside the block, if `fn` is a derivative beyond the first."""
    needed = fn.order > 1 and fn.base.traits.autograd.fused_norm is not None
    return CompositeNorms() if needed else contextlib.nullcontext()


def refuse_once_differentiable(traced: TracedFunction, order: int) -> None:
    """Raise if torch has no second derivative, for which it would give zeros."""
    name = traced.once_differentiable
    if name is not None and order > 1:
        raise DifferentiationError(
            f"`{traced.name}` uses the autograd.Function `{name}`, whose backward is once_differentiable, so torch "
            "has its gradient alone: no second derivative, and no forward mode, which takes two reverse modes here. "
            "Write the backward with differentiable operators, or give the Function a `jvp`."
        )


def _of_differentiated(derivative: Vjp | Jvp, primals: Tensors) -> Callable[..., Tensors]:
    """Return the function from the differentiated inputs to the differentiated outputs, with the other inputs fixed."""

    def of_wrt(*differentiated: torch.Tensor) -> Tensors:
        inputs = list(primals)
        for i, x in zip(derivative.wrt, differentiated, strict=True):
            inputs[i] = x
        results = derivative.fn(*inputs)
        return tuple(results[o] for o in derivative.outs)

    return of_wrt


def conjugate(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a gradient between torch's and JAX's convention for complex numbers; real tensors stay as they are."""
    return tensor.conj() if tensor.is_complex() else tensor


def _dense(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a dense tensor, as JAX needs it: embeddings with ``sparse=True`` have sparse gradients."""
    return grad if grad.layout is torch.strided else grad.to_dense()


def _with_axis(type_: ArrayType, dim: int, size: int) -> ArrayType:
    return ArrayType((*type_.shape[:dim], size, *type_.shape[dim:]), type_.dtype)
