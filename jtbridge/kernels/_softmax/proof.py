"""The cases on which the softmax kernels are proven: short, odd and long rows, and tiles of rows."""

from __future__ import annotations

from collections.abc import Iterator

from jtbridge.kernels._proving import Case, dtypes, normal

from .op import log_softmax, softmax


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for dtype in dtypes():
        for rows, n in ((3, 5), (70, 60), (2, 1000), (2, 20_000)):
            for function in (softmax, log_softmax):
                name = f"{function.__name__} of {rows} rows of {n}, {dtype}"
                yield Case(name, function, [3 * normal(rows, n, dtype=dtype)], (0,))
