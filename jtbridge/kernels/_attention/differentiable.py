"""Attention as differentiable kernels: by Triton kernels or cuDNN on a GPU, and in jnp elsewhere."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jtbridge.kernels._chip import target
from jtbridge.kernels._differentiable import DifferentiableKernel
from jtbridge.kernels._launch import interpreting
from jtbridge.kernels._primitive import BatchingRule, KernelPrimitive
from jtbridge.kernels._tuning import LaunchParameters, launch_tuned, size
from jtbridge.triton import unsupported_reason as triton_unsupported_reason

from . import configurations, cudnn, reference
from .choice import Implementation, decided
from .reference import AttentionSettings


@functools.lru_cache(256)
def differentiable_kernel(settings: AttentionSettings) -> DifferentiableKernel:
    """Return attention by the Triton kernels, with the log-sum-exp of the scores as a second result."""

    def primitive(of_reference: Any, kernels: Any, gradient: bool) -> KernelPrimitive:
        keywords = {"settings": settings}
        return KernelPrimitive(
            functools.partial(of_reference, **keywords),
            functools.partial(kernels, **keywords),
            _fold(settings, gradient),
        )

    return DifferentiableKernel(
        forward=primitive(reference.forward, _forward, gradient=False),
        backward=primitive(reference.backward, _backward, gradient=True),
        results=2,
        saved=lambda inputs, outputs: [*inputs, *outputs],
    )


@functools.lru_cache(256)
def kernel_or_cudnn(settings: AttentionSettings, implementation: Implementation | None) -> DifferentiableKernel:
    """Return attention by the kernels or by cuDNN, chosen when the program is lowered. The only result is the output.

    The residuals of the forward are the same for both, so that forward and backward are each chosen independently.
    """

    def either(of_kernels: Any, of_cudnn: Any, of_reference: Any) -> Any:
        def run(*arrays: jax.Array) -> Sequence[jax.Array]:
            query, key = arrays[:2]
            if not interpreting() and decided(query, key, settings, implementation).implementation == "cudnn":
                return of_cudnn(*arrays, settings=settings)
            without_triton = not interpreting() and triton_unsupported_reason() is not None
            return (of_reference if without_triton else of_kernels)(*arrays, settings=settings)

        return run

    def primitive(of_reference: Any, of_kernels: Any, of_cudnn: Any) -> KernelPrimitive:
        return KernelPrimitive(
            functools.partial(of_reference, settings=settings),
            either(of_kernels, of_cudnn, of_reference),
            _fold(settings, gradient=False),
            needs_triton=False,
        )

    return DifferentiableKernel(
        forward=primitive(reference.forward, _forward, cudnn.forward),
        backward=primitive(reference_backward, _backward_of_output, cudnn.backward),
        results=1,
        saved=lambda inputs, outputs: [*inputs, *outputs],
        alone=primitive(reference_output, lambda *xs, settings: _forward(*xs, settings=settings)[:1], cudnn.output),
    )


def reference_output(*arrays: jax.Array, settings: AttentionSettings) -> Sequence[jax.Array]:
    return reference.forward(*arrays, settings=settings)[:1]


def reference_backward(*arrays: jax.Array, settings: AttentionSettings) -> Sequence[jax.Array]:
    return reference.backward(*arrays, jnp.zeros_like(arrays[-2]), settings=settings)


def _backward_of_output(*arrays: jax.Array, settings: AttentionSettings) -> Sequence[jax.Array]:
    return _backward(*arrays, jnp.zeros_like(arrays[-2]), settings=settings)


def _fold(settings: AttentionSettings, gradient: bool) -> BatchingRule:
    """Return the batching rule that folds a batch axis into the first axis of the arrays, their batch.

    A mask may have size 1 on that axis.
    """
    of_mask = 3 if settings.mask != "none" else None
    # The gradient of an additive mask needs a separate part for each batch element, so the mask is expanded first.
    expanded = settings.mask == "additive" and gradient

    def batching_rule(
        primitive: KernelPrimitive, batched: Sequence[bool], arrays: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        size = next(x.shape[0] for b, x in zip(batched, arrays, strict=True) if b)
        batch = arrays[0].shape[1 if batched[0] else 0]

        def folded(i: int, x: jax.Array) -> jax.Array:
            if i == of_mask and not batched[i] and x.shape[0] == 1 and not expanded:
                return x
            inner = x.shape[1:] if not batched[i] else x.shape[2:]
            whole = jnp.broadcast_to(x if batched[i] else x[None], (size, batch, *inner))
            return whole.reshape(size * batch, *inner)

        outputs = primitive(*(folded(i, x) for i, x in enumerate(arrays)))
        results = [y.reshape(size, batch, *y.shape[1:]) for y in outputs]
        if expanded and arrays[3].shape[1 if batched[3] else 0] == 1:
            results[3] = results[3].sum(1, keepdims=True)
        return results

    return batching_rule


def _forward(*arrays: jax.Array, settings: AttentionSettings) -> list[jax.Array]:
    from .triton_forward import attention_forward

    query = arrays[0]
    return _launched(
        attention_forward,
        arrays,
        [],
        [query, jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)],
        settings,
        configurations.FORWARD,
        by_keys=False,
    )


def _backward(*arrays: jax.Array, settings: AttentionSettings) -> list[jax.Array]:
    from .triton_backward import attention_backward_key_value, attention_backward_query

    inputs, (out, logsumexp, ct, ct_logsumexp) = arrays[:-4], arrays[-4:]
    (query, key, value), mask, seeds = settings.split(inputs)
    # The gradient of the scores is weights * (ct @ value.T - delta). The derivative of the log-sum-exp with respect to
    # the scores is the weights, so its cotangent is part of delta.
    delta = jnp.sum(out.astype(jnp.float32) * ct.astype(jnp.float32), -1) - ct_logsumexp
    more = [ct, logsumexp * jnp.float32(math.log2(math.e)), delta]
    grad_key, grad_value = _launched(
        attention_backward_key_value,
        inputs,
        more,
        [key, value],
        settings,
        configurations.BACKWARD_KEY_VALUE,
        by_keys=True,
    )
    (grad_query,) = _launched(
        attention_backward_query,
        inputs,
        more,
        [query],
        settings,
        configurations.BACKWARD_QUERY,
        by_keys=False,
    )
    gradients = [grad_query, grad_key, grad_value]
    if mask is not None and settings.mask == "additive":
        # XLA removes this computation where the gradient of the mask is not used.
        gradients.append(
            reference.mask_gradient(query, key, value, mask, seeds, ct, logsumexp, delta, settings=settings)
        )
    return gradients


def _launched(
    kernel: Any,
    inputs: Sequence[jax.Array],
    more: Sequence[jax.Array],
    like: Sequence[Any],
    settings: AttentionSettings,
    table: configurations.Table,
    *,
    by_keys: bool,
) -> list[jax.Array]:
    (query, key, value), mask, seeds = settings.split(inputs)
    batch, heads, q_len, d = query.shape
    kv_heads, kv_len = key.shape[1:3]
    block_d = configurations.padded_head_size(d)
    entry = block_d, query.dtype.itemsize
    # A kernel without a mask or dropout does not read the mask or the seeds, so it gets the query instead.
    absent = query
    strides = (0, 0, 0, 0) if mask is None else _strides(mask.shape)
    constants = {
        "heads": heads,
        "kv_heads": kv_heads,
        "q_len": q_len,
        "kv_len": kv_len,
        "d": d,
        "scale": settings.scale,
        "left": q_len if settings.left is None else min(settings.left, q_len),
        "right": kv_len if settings.right is None else min(settings.right, kv_len),
        "mask": settings.mask,
        **dict(zip(("mask_batch", "mask_head", "mask_row", "mask_column"), strides, strict=True)),
        "threshold": settings.threshold,
        "boost": settings.boost,
        # "tf32x3" has the accuracy of float32 on tensor cores: three products of their 19-bit numbers.
        "precision": target().precision("tf32x3" if query.dtype == jnp.float32 else "tf32"),
        "block_d": block_d,
    }

    def launch_parameters(c: configurations.AttentionConfiguration) -> LaunchParameters:
        blocks = kv_heads * -(-kv_len // c.keys) if by_keys else heads * -(-q_len // c.queries)
        return LaunchParameters(
            (batch * blocks,), {**constants, "block_q": c.queries, "block_k": c.keys}, c.warps, c.stages
        )

    return launch_tuned(
        kernel,
        query,
        key,
        value,
        absent if mask is None else mask,
        absent if seeds is None else seeds,
        *more,
        out_types=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        candidates=[
            configurations.default(table, entry, target(), settings.mask == "additive"),
            *table[entry],
        ],
        problem={
            "dtype": str(query.dtype),
            "programs": size(batch * heads),
            "shared_by": heads // kv_heads,
            "q_len": size(q_len),
            "kv_len": size(kv_len),
            "head_size": block_d,
            "left": None if settings.left is None else size(settings.left),
            "right": None if settings.right is None else size(settings.right),
            "mask": settings.mask,
            "dropout": settings.dropout_rate > 0,
        },
        launch_parameters=launch_parameters,
    )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a mask of this shape, in elements; 0 along dimensions that are broadcast."""
    return tuple(0 if n == 1 else math.prod(shape[i + 1 :]) for i, n in enumerate(shape))
