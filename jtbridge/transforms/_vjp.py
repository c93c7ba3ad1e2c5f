"""The vector-Jacobian product of a torch function."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from jtbridge._compat import (
    backwards_that_may_detach,
    custom_backwards,
    has_plain_memory,
    inside_functorch,
    is_zero,
    once_differentiable_in,
    reentrant_checkpoints,
    run_backward,
)
from jtbridge.core import random_numbers
from jtbridge.core.array_types import ArrayType, Tensors, is_dense, kind_of_layout
from jtbridge.core.loans import lent
from jtbridge.core.nested_calls import setting_inside
from jtbridge.core.positions import of_differentiated
from jtbridge.core.second_gradients import as_variable
from jtbridge.errors import DifferentiationError
from jtbridge.triton import intercepted_launches

from ._batch_statistics import WITH_DIFFERENTIABLE_STATISTICS, is_refusal
from ._composite import ReplacementMode
from ._derived import (
    Derived,
    conjugate,
    differentiable_norms,
    refuse_lost_gradients,
    refuse_once_differentiable,
    refuse_wrong_batches,
    refused_detached_backwards,
)
from ._linearity import linear_gradients, may_be_nonlinear


@dataclasses.dataclass(frozen=True)
class Vjp(Derived):
    """Vector-Jacobian product ``(x, ct) -> ct @ Df(x)`` for the inputs `wrt` and the outputs `outs`.

    It is computed by torch's reverse mode.

    Attributes:
        linearly: whether the product must be linear in the cotangents, because its transpose is taken at any of them.
    """

    wrt: tuple[int, ...]
    outs: tuple[int, ...]
    linearly: bool = False

    @property
    def in_types(self) -> tuple[ArrayType, ...]:  # type: ignore[override]
        return self.fn.in_types + tuple(self.fn.out_types[o] for o in self.outs)

    @property
    def out_types(self) -> tuple[ArrayType, ...]:  # type: ignore[override]
        return tuple(self.fn.in_types[i] for i in self.wrt)

    @setting_inside
    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        refuse_once_differentiable(self.base, self.order)
        count = len(self.fn.in_types)
        primals, cotangents = tensors[:count], [conjugate(ct) for ct in tensors[count:]]
        written_out = differentiable_norms(self) if self.order > 1 else contextlib.nullcontext()
        with written_out, intercepted_launches():  # a backward may launch kernels too
            if inside_functorch():
                grads = self._by_functorch(primals, cotangents)
            else:
                grads = self.by_autograd(primals, cotangents)[1]
        return tuple(conjugate(grad) for grad in grads)

    @setting_inside
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
                inputs[i] = as_variable(primals[i])  # a new tensor, even if the same array was passed twice
            with around or contextlib.nullcontext():
                results = self._results(inputs)
            pairs = [(results[o], ct) for o, ct in zip(self.outs, cotangents, strict=True) if results[o].requires_grad]
            if again and self.base.traits.untraceable_reason:  # traceable functions were examined before they run
                self.base.cache.once_differentiable = once_differentiable_in([y for y, _ in pairs])
                refuse_once_differentiable(self.base, 2)
            if not pairs:
                return results, tuple(torch.zeros_like(primals[i]) for i in self.wrt)
            outputs, cts = [y for y, _ in pairs], [ct for _, ct in pairs]
            with self._seeded_again(primals):
                return results, self._gradients(outputs, [inputs[i] for i in self.wrt], cts, again, primals)

    def _gradients(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        cts: list[torch.Tensor],
        again: bool,
        primals: Tensors,
    ) -> Tensors:
        """Return the gradients of `outputs` with respect to `inputs`. Autograd records them if `again` is true."""
        refuse_lost_gradients(self.base.name, outputs)
        extra = reentrant_checkpoints(outputs, inputs)
        watched = contextlib.nullcontext()
        if again and backwards_that_may_detach(outputs):
            watched = refused_detached_backwards(self.base.name, outputs)
            cts = [ct if ct.requires_grad else ct.detach().requires_grad_() for ct in cts]
        custom = custom_backwards(outputs)

        def gradients(cts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
            if not custom or not all(map(has_plain_memory, cts)):
                return torch.autograd.grad(
                    outputs, inputs, cts, retain_graph=again, create_graph=again, allow_unused=True
                )
            # A user's backward may keep its cotangent, and may write to a tensor that the forward saved.
            with lent([x for x in primals if has_plain_memory(x)]):
                return run_backward(outputs, [ct.clone() for ct in cts], inputs, create_graph=again, retain_graph=again)

        with watched:
            if self.linearly and may_be_nonlinear(outputs, has_hooks=self.base.cache.reads_graph):
                grads = linear_gradients(self.base.name, cts, gradients)
            else:
                grads = gradients(cts)
        if again:
            refuse_lost_gradients(self.base.name, [grad for grad in grads if grad is not None])
        # A lazy zero is left out of the sum: it changes nothing, and may be on another device.
        found = [
            [dense_gradient(self.base.name, part) for part in parts if part is not None and not is_zero(part)]
            for parts in zip(grads, extra, strict=True)
        ]
        return tuple(
            sum(parts[1:], parts[0]) if parts else torch.zeros_like(x) for x, parts in zip(inputs, found, strict=True)
        )

    def _results(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        traced = self.base
        if not traced.cache.differentiable_statistics:
            try:
                return self.fn(*inputs)
            except RuntimeError as error:
                if not is_refusal(error):
                    raise
                traced.cache.differentiable_statistics = True
        with ReplacementMode(WITH_DIFFERENTIABLE_STATISTICS):
            return self.fn(*inputs)

    def _by_functorch(self, primals: Tensors, cotangents: Sequence[torch.Tensor]) -> Tensors:
        """Return the gradients by torch.func, for calls under torch.vmap or torch.func.jvp.

        Plain autograd does not work under these transforms.
        """

        of_wrt = of_differentiated(self.fn, self.wrt, self.outs, primals)
        may_not_be_linear = False

        def with_gradients(*differentiated: torch.Tensor) -> Tensors:
            results = of_wrt(*differentiated)
            refuse_lost_gradients(self.base.name, results)
            refuse_wrong_batches(results)
            if self.linearly:
                nonlocal may_not_be_linear
                may_not_be_linear = may_be_nonlinear(results, has_hooks=self.base.cache.reads_graph)
            return results

        pullback = torch.func.vjp(with_gradients, *(primals[i] for i in self.wrt))[1]
        with self._seeded_again(primals):
            if may_not_be_linear:
                grads = linear_gradients(self.base.name, cotangents, lambda cts: pullback(tuple(cts)))
            else:
                grads = pullback(tuple(cotangents))
        return tuple(dense_gradient(self.base.name, grad) for grad in grads)  # type: ignore[arg-type]

    def _seeded_again(self, primals: Tensors) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a backward draws from the key of the call, not from generators of the process."""
        position = self.base.seed_position
        return contextlib.nullcontext() if position is None else random_numbers.seeded_again(primals[position])


def dense_gradient(name: str, grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a dense tensor, as JAX needs it.

    Embeddings with ``sparse=True`` have sparse gradients, and a `MaskedTensor` has one: 0 where it has no value.

    Raises:
        DifferentiationError: the gradient is of another class of tensors with operators of its own.
    """
    if is_dense(grad):
        return grad
    if grad.layout is not torch.strided:
        return grad.to_dense()
    if isinstance(grad, torch.masked.MaskedTensor):
        return grad.to_tensor(0)
    kind, _ = kind_of_layout(grad)
    raise DifferentiationError(
        f"A gradient of `{name}` {kind}, which JAX does not have. Return a plain tensor from the backward or the "
        "hook that makes it; or, if no gradient is wanted, apply `jax.lax.stop_gradient` to the arguments of the call."
    )
