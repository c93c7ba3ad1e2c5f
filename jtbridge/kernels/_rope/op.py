"""Rotary position embedding as a JAX function with derivatives and batching."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jtbridge.kernels._differentiable import DifferentiableKernel
from jtbridge.kernels._primitive import KernelPrimitive, grouped
from jtbridge.kernels._shapes import FLOATS, check_floating, next_power_of_2, unsupported_dtype_reason
from jtbridge.kernels._tuning import LaunchParameters, launch_tuned, size

from . import reference
from .configurations import RopeConfiguration, candidates
from .reference import Rotation

# Tokens times d must be less than this number, so that offsets into an array of angles fit into 32 bits.
_ELEMENT_LIMIT = 2**31


def unsupported_reason(cos: jax.Array, sin: jax.Array, *xs: jax.Array) -> str | None:
    """Return the reason that the kernel cannot run on arrays ``x[..., heads, tokens, d]``; None if it can."""
    rotated = list(zip(("q", "k") if len(xs) > 1 else ("x",), xs, strict=False))
    for name, array in [*rotated, ("cos", cos), ("sin", sin)]:
        if reason := unsupported_dtype_reason(name, array.dtype, FLOATS):
            return reason
    name_of_first, first = rotated[0]
    for name, x in rotated:
        if x.dtype != first.dtype:
            return f"`{name_of_first}` is {first.dtype} and `{name}` is {x.dtype}"
    for name, x in rotated:
        if 0 in x.shape:
            return f"`{name}` has no elements"
    return (
        None
        if math.prod(cos.shape[-2:]) < _ELEMENT_LIMIT
        else f"`cos` has {_ELEMENT_LIMIT} or more elements for each batch row"
    )


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Compute ``x * cos + rotate_half(x) * sin``, where ``rotate_half((a, b)) = (-b, a)``.

    a and b are the halves of the last dimension. With `interleaved` they are neighbours: the elements at even and at
    odd positions. Models of Hugging Face use both kinds. The result is computed in float32 and rounded once. A Triton
    kernel computes the forward and the backward where the program is lowered for a GPU; elsewhere both are computed in
    jnp. The function is differentiable to any order, also with respect to cos and sin, which may be any numbers. Under
    vmap, one launch computes the whole batch, also if each element of the batch has its own angles.

    Args:
        x: [..., heads, tokens, d], float32, bfloat16 or float16; other floating-point dtypes are computed in jnp.
        cos: [tokens, d], or [..., tokens, d] with all dimensions of x before the heads; of any of these dtypes.
        sin: like `cos`.
        interleaved: whether neighbours are rotated; cos and sin have d columns in this case too.

    Returns:
        An array like `x`.

    Raises:
        TypeError: an argument is not of a real floating-point dtype.
        ValueError: d is odd, or a shape is not one of the shapes above.

    Example:
        >>> import jax.numpy as jnp
        >>> from jtbridge.kernels import rope
        >>> quarter_turn = jnp.zeros((1, 2)), jnp.ones((1, 2))
        >>> rope(jnp.array([[[1.0, 2.0]]]), *quarter_turn).tolist()
        [[[-2.0, 1.0]]]

    Source: Su et al., arXiv:2104.09864; transformers, `apply_rotary_pos_emb` of Llama, and of Cohere, interleaved.
    """
    return _apply_rope(cos, sin, interleaved, x=x)[0]


def rope_qk(
    q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Apply :func:`rope` to queries and keys, in one launch.

    Args:
        q: [..., heads, tokens, d], float32, bfloat16 or float16; other floating-point dtypes are computed in jnp.
        k: [..., heads, tokens, d], like `q` except for the number of heads.
        cos: [tokens, d], or [..., tokens, d] with all dimensions of q before the heads; of any of these dtypes.
        sin: like `cos`.
        interleaved: whether neighbours are rotated instead of halves.

    Returns:
        Arrays like `q` and `k`.

    Raises:
        TypeError: an argument is not of a real floating-point dtype.
        ValueError: d is odd, or a shape is not one of the shapes above.

    Example:
        >>> import jax.numpy as jnp
        >>> from jtbridge.kernels import rope_qk
        >>> q, k = rope_qk(jnp.ones((4, 3, 2)), jnp.ones((1, 3, 2)), jnp.zeros((3, 2)), jnp.ones((3, 2)))
        >>> q[0, 0].tolist(), k.shape
        ([-1.0, 1.0], (1, 3, 2))
    """
    first, second = _apply_rope(cos, sin, interleaved, q=q, k=k)
    return first, second


def _apply_rope(cos: jax.Array, sin: jax.Array, interleaved: bool, **named: jax.Array) -> list[jax.Array]:
    cos, sin = jnp.asarray(cos), jnp.asarray(sin)
    named = {name: jnp.asarray(x) for name, x in named.items()}
    _check_rope(cos, sin, named)
    xs = list(named.values())
    leading, (tokens, d) = xs[0].shape[:-3], xs[0].shape[-2:]
    arrays = [
        *(x.reshape(1, math.prod(leading), *x.shape[-3:]) for x in xs),
        *(angle.reshape(1, math.prod(angle.shape[:-2]), tokens, d) for angle in (cos, sin)),
    ]
    rotation = Rotation(interleaved=bool(interleaved))
    if unsupported_reason(cos, sin, *xs):
        results = reference.forward(*arrays, rotation=rotation)
    else:
        results = differentiable_kernel(len(xs), rotation)(*arrays)
    return [y.reshape(x.shape) for x, y in zip(xs, results, strict=True)]


def _check_rope(cos: jax.Array, sin: jax.Array, named: dict[str, jax.Array]) -> None:
    check_floating(**named, cos=cos, sin=sin)
    (name, x), *others = named.items()
    if x.ndim < 3 or x.shape[-1] % 2:
        raise ValueError(f"`{name}` has shape {x.shape}, expected [..., heads, tokens, d] with an even d")
    for other, y in others:
        if (*y.shape[:-3], *y.shape[-2:]) != (*x.shape[:-3], *x.shape[-2:]) or y.ndim < 3:
            raise ValueError(
                f"`{other}` has shape {y.shape}, expected that of `{name}`, {x.shape}, except for the heads (-3)"
            )
    for other, y in {"cos": cos, "sin": sin}.items():
        if y.shape != cos.shape or y.shape not in (x.shape[-2:], (*x.shape[:-3], *x.shape[-2:])):
            raise ValueError(
                f"`{other}` has shape {y.shape}, expected {x.shape[-2:]} or {(*x.shape[:-3], *x.shape[-2:])} for "
                f"`{name}` of shape {x.shape}, the same for `cos` and `sin`"
            )


@functools.cache
def differentiable_kernel(count: int, rotation: Rotation) -> DifferentiableKernel:
    """Return the differentiable kernel that rotates `count` arrays; its arguments are the arrays, then cos and sin."""
    of = functools.partial(functools.partial, rotation=rotation)
    angles = (count, count + 1)
    return DifferentiableKernel(
        forward=KernelPrimitive(of(reference.forward), of(_forward), grouped(shared=angles)),
        backward=KernelPrimitive(of(reference.backward), of(_backward), grouped(shared=angles)),
        results=count,
        saved=lambda inputs, outputs: inputs,
    )


def _forward(*arrays: jax.Array, rotation: Rotation) -> list[jax.Array]:
    *xs, cos, sin = arrays
    return _launched(xs, cos, sin, rotation, transposed=False)


def _backward(*arrays: jax.Array, rotation: Rotation) -> list[jax.Array]:
    count = (len(arrays) - 2) // 2
    cos, sin = arrays[count : count + 2]
    grads = _launched(arrays[count + 2 :], cos, sin, rotation, transposed=True)
    # The gradients of the angles are seldom used, and XLA removes them where they are not.
    return [*grads, *reference.angle_gradients(*arrays, rotation=rotation)]


def _launched(
    xs: Sequence[jax.Array], cos: jax.Array, sin: jax.Array, rotation: Rotation, *, transposed: bool
) -> list[jax.Array]:
    from .triton_kernel import rope_rotate

    groups, batches = xs[0].shape[:2]
    tokens, d = cos.shape[2:]
    heads = [x.shape[rotation.heads] for x in xs] + [0] * (2 - len(xs))
    constants = {
        "batches": batches,
        "tokens": tokens,
        "half": d // 2,
        "q_heads": heads[0],
        "k_heads": heads[1],
        "group_stride": cos.size // cos.shape[0] if cos.shape[0] > 1 else 0,
        "batch_stride": tokens * d if cos.shape[1] > 1 else 0,
        "transposed": transposed,
        "half_block": next_power_of_2(d // 2),
        **dataclasses.asdict(rotation),
    }

    def launch_parameters(c: RopeConfiguration) -> LaunchParameters:
        blocks = sum(math.ceil(h / c.head_block) for h in heads) * math.ceil(tokens / c.token_block)
        of_program = {"head_block": c.head_block, "token_block": c.token_block}
        return LaunchParameters((groups * batches * blocks,), {**constants, **of_program}, c.warps)

    results = launch_tuned(
        rope_rotate,
        *(xs[0], xs[-1], cos, sin),
        # Without a second array, its result is an array of one element that the kernel does not write.
        out_types=[
            jax.ShapeDtypeStruct(x.shape if h else (1,), x.dtype) for x, h in zip((xs[0], xs[-1]), heads, strict=True)
        ],
        candidates=candidates(max(heads), tokens, d // 2, rotation.interleaved),
        # The key does not contain `transposed`: the transpose moves the same memory and takes the same configuration.
        problem={
            "dtypes": f"{xs[0].dtype} {cos.dtype} {sin.dtype}",
            "rows": size(groups * batches),
            "tokens": size(tokens),
            "half": size(d // 2),
            "q_heads": size(heads[0]),
            "k_heads": size(heads[1]) if heads[1] else 0,
            "angles": size(math.prod(cos.shape[:2])),
            **dataclasses.asdict(rotation),
        },
        launch_parameters=launch_parameters,
    )
    return results[: len(xs)]
