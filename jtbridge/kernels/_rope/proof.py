"""The cases on which the kernels of rotary embeddings are proven: halves and neighbours, one array and two."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax.numpy as jnp

from jtbridge.kernels._proving import Case, dtypes, normal

from .op import rope, rope_qk


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for dtype in dtypes():
        for heads, tokens, d in ((2, 5, 8), (3, 130, 64), (1, 17, 128)):
            angle = normal(tokens, d, dtype="float32", seed=2)
            cos, sin = jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)
            q, k = normal(2, heads, tokens, d, dtype=dtype), normal(2, 1, tokens, d, dtype=dtype, seed=1)
            for interleaved in (False, True):
                sizes = f"{heads} heads of {d}, {tokens} tokens, {'neighbours' if interleaved else 'halves'}, {dtype}"
                options = {"interleaved": interleaved}
                yield Case(f"rope of {sizes}", functools.partial(rope, **options), [q, cos, sin], (0,))
                yield Case(f"rope_qk of {sizes}", functools.partial(rope_qk, **options), [q, k, cos, sin], (0, 1))
