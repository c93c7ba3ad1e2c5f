"""Cross-entropy as a JAX function with derivatives and batching."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jtbridge.kernels._differentiable import DifferentiableKernel
from jtbridge.kernels._primitive import KernelPrimitive, leading
from jtbridge.kernels._shapes import FLOATS, check_floating, integer, unsupported_dtype_reason
from jtbridge.kernels._tuning import LaunchParameters, launch_tuned, size

from . import reference
from .configurations import BackwardConfiguration, ForwardConfiguration, candidates_backward, candidates_forward

Reduction = Literal["mean", "sum", "none"]

LABELS = (jnp.dtype("int32"), jnp.dtype("int64"))


def unsupported_reason(logits: jax.Array, labels: jax.Array) -> str | None:
    """Return the reason that the kernel cannot run on ``logits[..., classes]`` and ``labels[...]``; None if it can."""
    return (
        unsupported_dtype_reason("logits", logits.dtype, FLOATS)
        or unsupported_dtype_reason("labels", labels.dtype, LABELS)
        or ("`logits` has no elements" if 0 in logits.shape else None)
    )


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> jax.Array:
    """Compute ``-log(softmax(logits)[label])`` of each row, as ``torch.nn.functional.cross_entropy`` does.

    Where the program is lowered for a GPU, one Triton kernel reads the logits once for the loss, and another reads them
    once more for the gradient. Elsewhere both are computed in jnp. Sums are accumulated in float32. The function is
    differentiable to any order. Under vmap, one launch computes the rows of the whole batch. Unlike in torch, the
    classes are the last dimension, not the second.

    Args:
        logits: [..., classes], float32, bfloat16 or float16; other floating-point dtypes are computed in jnp.
        labels: [...], integers: the class of each row. A label that is neither a class nor `ignore_index` makes the
            loss of its row, and the gradient, NaN.
        label_smoothing: the part of the target, from 0 to 1, that is spread evenly over all classes.
        ignore_index: the label of rows whose loss and gradient are 0.
        reduction: "mean" divides the sum by the number of rows that are not ignored, and is NaN if all rows are
            ignored; "sum"; or "none".

    Returns:
        The loss in the dtype of the logits: a scalar, or [...] for "none".

    Raises:
        TypeError: `labels` or `ignore_index` are not integers, or `logits` not of a real floating-point dtype.
        ValueError: the shapes do not fit, there are no classes, or `label_smoothing` or `reduction` is not one of the
            values above.

    Example:
        >>> import jax.numpy as jnp
        >>> from jtbridge.kernels import cross_entropy
        >>> loss = cross_entropy(jnp.zeros((2, 4)), jnp.array([3, -100]))
        >>> bool(jnp.isclose(loss, jnp.log(4.0)))
        True

    Source: Milakov and Gimelshein, arXiv:1805.02867; label smoothing of Szegedy et al., arXiv:1512.00567.
    """
    logits, labels, ignore_index = jnp.asarray(logits), as_labels(labels), integer("ignore_index", ignore_index)
    check_floating(logits=logits)
    check_options(label_smoothing, reduction)
    if labels.shape != logits.shape[:-1] or not logits.ndim:
        raise ValueError(
            f"`labels` has shape {labels.shape}, but `logits` {logits.shape}: expected one label for each row of"
            f" classes, the last dimension of `logits`"
        )
    if not logits.shape[-1]:
        raise ValueError(f"`logits` has shape {logits.shape}: there are no classes")
    if unsupported_reason(logits, labels):
        losses = reference.forward(logits, labels, ignore_index=ignore_index, smoothing=float(label_smoothing))[0]
    else:
        losses = rows_operation(ignore_index, float(label_smoothing))(logits, labels)[0]
    return reduced_losses(losses, labels, ignore_index, reduction).astype(logits.dtype)


def as_labels(labels: jax.Array) -> jax.Array:
    """Return labels in a dtype that the kernels take: int32 and int64 as they are, other integers as int32.

    Raises:
        TypeError: the labels are not integers.
    """
    labels = jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"`labels` is {labels.dtype}, expected integers: class indices, not probabilities")
    if labels.dtype in LABELS:
        return labels
    # A large unsigned label must not wrap to the `ignore_index`.
    largest = min(jnp.iinfo(labels.dtype).max, jnp.iinfo(jnp.int32).max)
    return jnp.minimum(labels, jnp.asarray(largest, labels.dtype)).astype(jnp.int32)


def check_options(label_smoothing: float, reduction: str) -> None:
    """Raise a ValueError if an option of the loss is not valid."""
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"`label_smoothing` is {label_smoothing}, expected a number from 0 to 1")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"`reduction` is {reduction!r}, expected 'mean', 'sum' or 'none'")


def reduced_losses(losses: jax.Array, labels: jax.Array, ignore_index: int, reduction: Reduction) -> jax.Array:
    """Return the losses of the rows, their sum, or their mean over the rows that are not ignored."""
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else mean_loss(losses.sum(), labels, ignore_index)


def mean_loss(total: jax.Array, labels: jax.Array, ignore_index: int) -> jax.Array:
    """Divide the sum of the losses by the number of labels that are not ignored.

    If all are ignored, the result is NaN and its derivative is 0.
    """
    count = (labels != ignore_index).sum()
    return jnp.where(count > 0, total / jnp.maximum(count, 1).astype(total.dtype), jnp.nan)


@functools.cache
def rows_operation(ignore_index: int, smoothing: float) -> DifferentiableKernel:
    """Return the differentiable kernel ``(logits, labels) -> (losses,)``: a loss for each row, in float32."""
    return DifferentiableKernel(
        forward=rows_forward(ignore_index, smoothing),
        backward=rows_backward(ignore_index, smoothing),
        results=1,
        saved=lambda inputs, outputs: [*inputs, outputs[1]],
    )


@functools.cache
def rows_forward(ignore_index: int, smoothing: float) -> KernelPrimitive:
    """Return the kernel primitive ``(logits, labels) -> (losses, log-sum-exp)``.

    The log-sum-exp of a row whose label is not a class is unspecified.
    """
    options = {"ignore_index": ignore_index, "smoothing": smoothing}
    return KernelPrimitive(
        functools.partial(reference.forward, **options), functools.partial(_forward, **options), leading()
    )


@functools.cache
def rows_backward(ignore_index: int, smoothing: float) -> KernelPrimitive:
    """Return the kernel primitive ``(logits, labels, log-sum-exp, cotangents) -> (gradient of the logits,)``."""
    options = {"ignore_index": ignore_index, "smoothing": smoothing}
    return KernelPrimitive(
        functools.partial(reference.backward, **options), functools.partial(_backward, **options), leading()
    )


def _forward(logits: jax.Array, labels: jax.Array, **options: Any) -> list[jax.Array]:
    from .triton_kernel import cross_entropy_forward

    of_row = jax.ShapeDtypeStruct(labels.shape, jnp.float32)
    candidates = candidates_forward(logits.shape[-1])
    return _launched(cross_entropy_forward, candidates, [of_row, of_row], logits, labels, **options)


def _backward(logits: jax.Array, *of_rows: jax.Array, **options: Any) -> list[jax.Array]:
    from .triton_kernel import cross_entropy_backward

    out_type = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
    candidates = candidates_backward(logits.shape[-1])
    return _launched(cross_entropy_backward, candidates, [out_type], logits, *of_rows, **options)


def _launched(
    kernel: Any,
    candidates: Sequence[ForwardConfiguration] | Sequence[BackwardConfiguration],
    out_types: Sequence[jax.ShapeDtypeStruct],
    logits: jax.Array,
    *of_rows: jax.Array,
    ignore_index: int,
    smoothing: float,
) -> list[jax.Array]:
    n, rows = logits.shape[-1], math.prod(logits.shape[:-1])

    def launch_parameters(
        c: ForwardConfiguration | BackwardConfiguration, ignored: int = ignore_index
    ) -> LaunchParameters:
        grid = (rows, -(-n // c.block)) if isinstance(c, BackwardConfiguration) else (rows,)
        return LaunchParameters(grid, {"n": n, **c.blocks, "ignore_index": ignored, "smoothing": smoothing}, c.warps)

    dtypes = f"{logits.dtype} {of_rows[0].dtype}"
    return launch_tuned(
        kernel,
        logits,
        *of_rows,
        out_types=out_types,
        candidates=candidates,
        problem={"dtypes": dtypes, "rows": size(rows), "n": size(n), "smoothed": smoothing > 0},
        launch_parameters=launch_parameters,
        # The labels of a timed launch are all 0. With `ignore_index=0` the kernel would not read any row.
        timed=functools.partial(launch_parameters, ignored=-1),
    )
