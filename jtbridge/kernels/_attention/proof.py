"""The cases on which the attention kernels are proven: causal, masked, grouped, windows, dropout, and head sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jtbridge.kernels._proving import Case, dtypes, normal

from .op import attention


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for dtype in dtypes():
        for heads, kv_heads, q_len, kv_len, d in ((2, 2, 5, 5, 16), (4, 2, 130, 70, 64), (1, 1, 64, 64, 128)):
            query = normal(2, heads, q_len, d, dtype=dtype)
            key, value = (normal(2, kv_heads, kv_len, d, dtype=dtype, seed=seed) for seed in (1, 2))
            sizes = f"{heads} heads of {d}, {q_len} queries, {kv_len} keys, {dtype}"
            for name, options in _attention_options(q_len, kv_len).items():
                function = functools.partial(attention, implementation="triton", **options)
                yield Case(f"attention, {name}, {sizes}", function, [query, key, value], (0, 1, 2))
            both = functools.partial(attention, return_logsumexp=True)
            yield Case(f"attention and logarithm, {sizes}", both, [query, key, value], (0, 1, 2))


def _attention_options(q_len: int, kv_len: int) -> dict[str, dict]:
    sees = (jnp.arange(q_len)[:, None] + jnp.arange(kv_len)) % 3 > 0
    return {
        "whole": {},
        "causal": {"is_causal": True},
        "window": {"window": (3, 2)},
        "boolean mask": {"mask": sees},
        "additive mask": {"mask": normal(q_len, kv_len, dtype="float32", seed=3)},
        "dropout": {"dropout_rate": 0.3, "dropout_key": jax.random.key(0)},
    }
