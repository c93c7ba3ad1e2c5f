"""The cases on which the kernels of products are proven: sizes below and above a block, and not multiples of one."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from jtbridge.kernels._proving import Case, dtypes, normal

from .op import matmul


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for dtype in dtypes():
        for m, k, n in ((1, 16, 16), (37, 65, 130), (256, 512, 256)):
            a, bias = normal(m, k, dtype=dtype), normal(n, dtype=dtype, seed=2)
            b, transposed = normal(k, n, dtype=dtype, seed=1), normal(n, k, dtype=dtype, seed=1)
            sizes = f"{m}x{k}x{n}, {dtype}"
            yield Case(f"matmul of {sizes}", matmul, [a, b], (0, 1))
            gelu = functools.partial(matmul, activation="gelu", transpose_b=True)
            yield Case(f"matmul with a bias and gelu of {sizes}", gelu, [a, transposed, bias], (0, 1, 2))
