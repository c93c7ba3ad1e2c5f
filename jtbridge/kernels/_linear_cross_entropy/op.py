"""Cross-entropy of a linear layer's outputs as a JAX function."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jtbridge.kernels._cross_entropy.op import LABELS, Reduction, as_labels, check_options, mean_loss
from jtbridge.kernels._shapes import FLOATS, check_floating, integer, unsupported_dtype_reason

from . import reference
from .chunks import Options
from .primitive import bind

# The default number of chunks, and the least default number of tokens per chunk: fewer do not keep tensor cores busy.
_CHUNKS, _FEWEST = 8, 512


def unsupported_reason(
    hidden: jax.Array, weight: jax.Array, labels: jax.Array, bias: jax.Array | None = None
) -> str | None:
    """Return the reason that the loss cannot be computed by chunks; None if it can."""
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and x.dtype != hidden.dtype:
            return f"`{name}` is {x.dtype}, but `hidden` {hidden.dtype}"
    return (
        unsupported_dtype_reason("hidden", hidden.dtype, FLOATS)
        or unsupported_dtype_reason("labels", labels.dtype, LABELS)
        or ("`hidden` has no elements" if 0 in hidden.shape else None)
        or ("`weight` has no elements" if 0 in weight.shape else None)
    )


def linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_size: int | None = None,
    accumulator_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Compute ``cross_entropy(hidden @ weight.T + bias, labels)`` without all logits in memory at once.

    XLA's matrix product computes the logits of a chunk of tokens, and the kernels of :func:`cross_entropy` reduce them.
    Where the loss is a scalar and is differentiated, the gradients are computed along with it, so that there are no
    more matrix products than with all logits in memory. With ``reduction="none"``, or for a batch of scalars, reverse
    mode computes the logits a second time. Derivatives of any order are computed by chunks.

    Beyond arguments and results, this takes the memory of two chunks of logits. Under differentiation it also takes the
    memory of the gradients, until they are multiplied by the cotangent of the loss.

    Args:
        hidden: [..., width], float32, bfloat16 or float16.
        weight: [classes, width], of the dtype of `hidden`. If dtypes differ, all logits are in memory at once.
        labels: [...], integers: the class of each row. A label that is neither a class nor `ignore_index` makes the
            loss and the gradients NaN.
        bias: [classes], or None.
        label_smoothing: the part of the target, from 0 to 1, that is spread evenly over all classes.
        ignore_index: the label of rows whose loss and gradient are 0.
        reduction: "mean" divides the sum by the number of rows that are not ignored, and is NaN if all rows are
            ignored; "sum"; or "none".
        chunk_size: the number of rows of a chunk; None for an eighth of all rows, but at least 512.
        accumulator_dtype: the dtype in which gradients of `weight` and `bias` are added up over chunks; within a chunk
            they are accumulated in float32. None for float32, except that up to 8 chunks of bfloat16 are added up in
            bfloat16: this takes no memory beyond the gradient, and adds at most one rounding error for each chunk.

    Returns:
        The loss in the dtype of `hidden`: a scalar, or [...] for "none".

    Raises:
        TypeError: `labels` or `ignore_index` are not integers, or another array is not of a real floating-point dtype.
        ValueError: the shapes do not fit, or an option is not one of the values above.

    Example:
        >>> import jax.numpy as jnp
        >>> from jtbridge.kernels import linear_cross_entropy
        >>> hidden, weight = jnp.ones((2, 3)), jnp.zeros((4, 3))
        >>> bool(jnp.isclose(linear_cross_entropy(hidden, weight, jnp.array([3, 1])), jnp.log(4.0)))
        True

    Source: gradients in the forward pass, by chunks, as in Hsu et al., Liger Kernel, arXiv:2410.10989.
    """
    hidden, weight, labels = jnp.asarray(hidden), jnp.asarray(weight), as_labels(labels)
    bias = None if bias is None else jnp.asarray(bias)
    ignore_index = integer("ignore_index", ignore_index)
    check_floating(hidden=hidden, weight=weight, bias=bias)
    check_options(label_smoothing, reduction)
    _check_argument_shapes(hidden, weight, labels, bias)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"`chunk_size` is {chunk_size}, expected a positive number of rows")
    if accumulator_dtype is not None and not jnp.issubdtype(accumulator_dtype, jnp.floating):
        raise ValueError(f"`accumulator_dtype` is {jnp.dtype(accumulator_dtype)}, expected a floating-point dtype")
    if unsupported_reason(hidden, weight, labels, bias):
        options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index, "reduction": reduction}
        return reference.forward(hidden, weight, labels, bias, **options)
    flat = hidden.reshape(-1, hidden.shape[-1])
    tokens = flat.shape[0]
    chunk = min(tokens, max(-(-tokens // _CHUNKS), _FEWEST) if chunk_size is None else chunk_size)
    if accumulator_dtype is None:
        few = hidden.dtype == jnp.bfloat16 and -(-tokens // chunk) <= _CHUNKS
        accumulator_dtype = jnp.bfloat16 if few else jnp.float32
    options = Options(float(label_smoothing), ignore_index, chunk, jnp.dtype(accumulator_dtype))
    loss = bind(
        flat,
        weight,
        jnp.zeros(0, hidden.dtype) if bias is None else bias,
        labels.reshape(-1),
        summed=reduction != "none",
        options=options,
    )
    if reduction == "mean":
        loss = mean_loss(loss, labels, ignore_index)
    return (loss.reshape(labels.shape) if reduction == "none" else loss).astype(hidden.dtype)


def _check_argument_shapes(hidden: jax.Array, weight: jax.Array, labels: jax.Array, bias: jax.Array | None) -> None:
    if not hidden.ndim or weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"`weight` has shape {weight.shape}, but `hidden` {hidden.shape}: expected [classes, width] and"
            f" [..., width]"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"`labels` has shape {labels.shape}, but `hidden` {hidden.shape}: expected one label for each row of"
            f" `hidden`"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"`bias` has shape {bias.shape}, but `weight` {weight.shape}: expected [classes]")
