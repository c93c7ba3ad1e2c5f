"""A differentiable function that consists of a forward and a backward kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

from jtbridge.core.positions import replaced
from jtbridge.core.primitive_rules import batch_first, primitive_of_several_results

from ._linear import bind_linear
from ._manual import as_varying, bind, lower_plainly
from ._primitive import BatchingRule, KernelPrimitive

Saved = Callable[[Sequence[jax.Array], Sequence[jax.Array]], Sequence[jax.Array]]


class DifferentiableKernel:
    """A function of arrays with a forward and a backward kernel, differentiable to any order.

    Reverse mode runs the backward kernel. Forward mode and higher derivatives differentiate the references.

    Args:
        forward: ``(*inputs) -> (*results, *more)``. The outputs after the results are for the backward.
        backward: ``(*saved, *cotangents) -> gradients``, one for each floating-point input.
        results: the number of results.
        saved: ``(inputs, outputs of forward) -> saved``: the residuals that the backward takes.
        alone: ``(*inputs) -> results``, run where no derivative is taken. None: `forward` is run.
        batching_rule: folds a batch axis into the inputs before a derivative is taken. The backward kernel then sums
            the gradient of an input without a batch axis over the batch, and no gradient is held for each element.
            None: the batching rules of `forward` and `backward` apply.
    """

    def __init__(
        self,
        forward: KernelPrimitive,
        backward: KernelPrimitive,
        *,
        results: int,
        saved: Saved,
        alone: KernelPrimitive | None = None,
        batching_rule: BatchingRule | None = None,
    ):
        self.forward = forward
        self.backward = backward
        self._results = results
        self._saved = saved
        self.batching_rule = batching_rule
        self.function = jax.custom_jvp(lambda *inputs: tuple((alone or forward)(*inputs)[:results]))
        self.function.defjvp(self._jvp)

    def __call__(self, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        if self.batching_rule is None:
            return self.function(*inputs)
        return tuple(bind(differentiable_kernel_p, *(jnp.asarray(x) for x in inputs), kernel=self))

    def _jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        count = len(primals)
        floating = [i for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.floating)]
        outputs = self.forward(*primals)

        def along(residuals: Sequence[Any], directions: Sequence[Any]) -> Sequence[Any]:
            def of_floating(*xs: Any) -> tuple[Any, ...]:
                inputs = replaced(residuals[:count], floating, xs)
                return tuple(self.forward.reference(*inputs))[: self._results]

            return jax.jvp(of_floating, tuple(residuals[i] for i in floating), tuple(directions))[1]

        def pull(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
            return self.backward(*residuals[count:], *cotangents)

        residuals = [*primals, *self._saved(primals, outputs)]
        derivatives = bind_linear(along, pull, residuals, [tangents[i] for i in floating])
        return tuple(outputs[: self._results]), tuple(derivatives)


differentiable_kernel_p = primitive_of_several_results("differentiable_kernel")


@differentiable_kernel_p.def_impl
def _impl(*inputs: Any, kernel: DifferentiableKernel) -> list[jax.Array]:
    return list(kernel.function(*inputs))


@differentiable_kernel_p.def_abstract_eval
def _abstract(*inputs: Any, kernel: DifferentiableKernel) -> list[ShapedArray]:
    return as_varying(kernel.function, inputs)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, kernel: DifferentiableKernel) -> tuple[Any, Any]:
    return jax.jvp(kernel.function, tuple(primals), tuple(ad.instantiate_zeros(t) for t in tangents))


def _batch(inputs: Sequence[Any], dims: Sequence[int | None], *, kernel: DifferentiableKernel) -> tuple[Any, Any]:
    inputs, dims = batch_first(inputs, dims)
    # A batching rule calls its first argument, and a differentiable kernel is called like a kernel primitive.
    results = kernel.batching_rule and kernel.batching_rule(kernel, [dim is not None for dim in dims], inputs)  # type: ignore[arg-type]
    if results is None:
        results = jax.vmap(kernel.function, dims)(*inputs)
    return list(results), [0] * len(results)


ad.primitive_jvps[differentiable_kernel_p] = _jvp
batching.primitive_batchers[differentiable_kernel_p] = _batch
mlir.register_lowering(differentiable_kernel_p, lower_plainly(_impl))
