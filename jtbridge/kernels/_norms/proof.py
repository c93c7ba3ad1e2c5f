"""The cases on which the kernels of norms are proven: with and without weights, biases and residuals."""

from __future__ import annotations

from collections.abc import Iterator

from jtbridge.kernels._proving import Case, dtypes, normal

from .op import layer_norm, rms_norm


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for dtype in dtypes():
        for rows, n in ((3, 6), (40, 1000), (2, 20_000)):
            x, residual = normal(rows, n, dtype=dtype), normal(rows, n, dtype=dtype, seed=1)
            weight, bias = normal(n, dtype=dtype, seed=2), normal(n, dtype=dtype, seed=3)
            sizes = f"{rows} rows of {n}, {dtype}"
            yield Case(f"layer_norm of {sizes}", layer_norm, [x, weight, bias], (0, 1, 2))
            yield Case(f"layer_norm without weight of {sizes}", layer_norm, [x], (0,))
            yield Case(f"rms_norm of {sizes}", rms_norm, [x, weight], (0, 1))
            yield Case(
                f"rms_norm with a residual of {sizes}",
                lambda x, weight, residual: rms_norm(x, weight, residual=residual, offset=1.0),
                [x, weight, residual],
                (0, 1, 2),
            )
