"""The cases on which the kernels of cross-entropy are proven: plain, and with label smoothing and ignored labels."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax.numpy as jnp

from jtbridge.kernels._proving import Case, dtypes, normal

from .op import cross_entropy


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for dtype in dtypes():
        for rows, n in ((3, 5), (5, 1000), (2, 50_000)):
            labels = (jnp.arange(rows, dtype=jnp.int32) * 7919) % n
            for smoothing in (0.0, 0.1):
                function = functools.partial(cross_entropy, label_smoothing=smoothing, reduction="none")
                name = f"cross_entropy of {rows} rows of {n}, smoothed by {smoothing}, {dtype}"
                given = labels.at[0].set(-100) if smoothing else labels
                yield Case(name, function, [2 * normal(rows, n, dtype=dtype), given], (0,))
