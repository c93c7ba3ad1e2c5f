"""A kernel as a JAX primitive: launched on a GPU, and computed in jnp elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

from jtbridge.core.primitive_rules import batch_first, primitive_of_several_results
from jtbridge.triton import unsupported_reason as triton_unsupported_reason

from . import _proofs, _proving
from ._eager import run_compiled
from ._launch import interpreting
from ._manual import as_varying, bind, lower_plainly

Arrays = Callable[..., Sequence[jax.Array]]
# (primitive, which arguments have a leading batch axis, arguments) -> results with a leading batch axis. None means
# that the rule does not apply to these arguments: the primitive then runs in a loop over the batch.
BatchingRule = Callable[["KernelPrimitive", Sequence[bool], Sequence[jax.Array]], "Sequence[jax.Array] | None"]


class KernelPrimitive:
    """A function of arrays, computed by a kernel on a GPU and in jnp elsewhere. Its JVP is the JVP of the reference.

    Args:
        reference: the function in jnp.
        kernel: the same function by Triton kernels.
        batching_rule: folds a batch axis into the arrays, see :func:`leading`. None: a loop with one launch for each
            element of the batch.
        needs_triton: whether the reference replaces the kernel on an NVIDIA GPU where Triton is missing. On an AMD GPU
            without Triton it always does.
    """

    def __init__(
        self, reference: Arrays, kernel: Arrays, batching_rule: BatchingRule | None = None, *, needs_triton: bool = True
    ):
        self.reference = reference
        self.kernel = kernel
        self.batching_rule = batching_rule
        self.needs_triton = needs_triton

    @property
    def name(self) -> str:
        """The name of the primitive: the folder and the function of its reference."""
        function = self.reference.func if isinstance(self.reference, functools.partial) else self.reference
        return f"{function.__module__.split('.')[-2].removeprefix('_')} {function.__name__}"

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        if _proofs.is_replaced(self.name):
            return list(self.reference(*arrays))
        return bind(kernel_primitive_p, *(jnp.asarray(x) for x in arrays), fn=self)

    def looped(self, batched: Sequence[bool], arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Run the primitive on the elements of a batch, one after the other."""

        def row(rows: Sequence[jax.Array]) -> list[jax.Array]:
            of_row = iter(rows)
            return self(*(next(of_row) if b else x for b, x in zip(batched, arrays, strict=True)))

        return jax.lax.map(row, [x for b, x in zip(batched, arrays, strict=True) if b])


def leading(shared: Sequence[int] = ()) -> BatchingRule:
    """Return the batching rule of primitives with any number of leading dimensions: the batch axis becomes one of them.

    The arguments whose indices are in `shared` have no leading dimensions. If one of them is batched, the rule does
    not apply.
    """

    def batching_rule(
        primitive: KernelPrimitive, batched: Sequence[bool], arrays: Sequence[jax.Array]
    ) -> Sequence[jax.Array] | None:
        if any(batched[i] for i in shared):
            return None
        size = next(x.shape[0] for b, x in zip(batched, arrays, strict=True) if b)
        return primitive(
            *(
                x if b or i in shared else jnp.broadcast_to(x, (size, *x.shape))
                for i, (b, x) in enumerate(zip(batched, arrays, strict=True))
            )
        )

    return batching_rule


def grouped(shared: Sequence[int]) -> BatchingRule:
    """Return the batching rule of primitives whose arguments and results begin with an axis of groups.

    A batch of `b` elements becomes `b` times as many groups. The arguments whose indices are in `shared` may have a
    group axis of size 1, which all groups share. If one of these arguments is batched or has more groups, all of them
    are expanded to all groups. All results have all groups, including the gradients of shared arguments.
    """

    def batching_rule(
        primitive: KernelPrimitive, batched: Sequence[bool], arrays: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        size = next(x.shape[0] for b, x in zip(batched, arrays, strict=True) if b)
        groups = max(x.shape[b] for b, x in zip(batched, arrays, strict=True))
        one = not any(batched[i] or arrays[i].shape[0] > 1 for i in shared)

        def merged(i: int, b: bool, x: jax.Array) -> jax.Array:
            if one and i in shared:
                return x
            inner = x.shape[b + 1 :]
            return jnp.broadcast_to(x if b else x[None], (size, groups, *inner)).reshape(size * groups, *inner)

        results = primitive(*(merged(i, b, x) for i, (b, x) in enumerate(zip(batched, arrays, strict=True))))
        return [y.reshape(size, groups, *y.shape[1:]) for y in results]

    return batching_rule


kernel_primitive_p = primitive_of_several_results("kernel_primitive")


@kernel_primitive_p.def_impl
def _impl(*arrays: Any, fn: KernelPrimitive) -> list[jax.Array]:
    observe = _proving.OBSERVER.get()
    if observe is not None:
        return list(observe(fn, arrays))
    return run_compiled(kernel_primitive_p, fn.name, *arrays, fn=fn)


@kernel_primitive_p.def_abstract_eval
def _abstract(*arrays: Any, fn: KernelPrimitive) -> list[ShapedArray]:
    return as_varying(fn.reference, arrays)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, fn: KernelPrimitive) -> tuple[Any, Any]:
    instantiated = tuple(ad.instantiate_zeros(t) for t in tangents)
    return fn(*primals), jax.jvp(lambda *xs: list(fn.reference(*xs)), tuple(primals), instantiated)[1]


def _batch(arrays: Sequence[Any], dims: Sequence[int | None], *, fn: KernelPrimitive) -> tuple[Any, Any]:
    batched = [dim is not None for dim in dims]
    arrays, _ = batch_first(arrays, dims)
    results = fn.batching_rule(fn, batched, arrays) if fn.batching_rule else None
    if results is None:
        results = fn.looped(batched, arrays)
    return list(results), [0] * len(results)


def _run_reference(*arrays: Any, fn: KernelPrimitive) -> list[Any]:
    return list((fn.kernel if interpreting() else fn.reference)(*arrays))


def _run_kernel(*arrays: Any, fn: KernelPrimitive, platform: str) -> list[Any]:
    # Only cuDNN's kernels run without Triton, and cuDNN does not run on AMD GPUs.
    needed = fn.needs_triton or platform == "rocm"
    _proofs.warn_if_failed(fn.name)
    return list((fn.reference if needed and triton_unsupported_reason(platform) else fn.kernel)(*arrays))


ad.primitive_jvps[kernel_primitive_p] = _jvp
batching.primitive_batchers[kernel_primitive_p] = _batch
mlir.register_lowering(kernel_primitive_p, lower_plainly(_run_reference))
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(
        kernel_primitive_p, lower_plainly(functools.partial(_run_kernel, platform=_platform)), platform=_platform
    )
