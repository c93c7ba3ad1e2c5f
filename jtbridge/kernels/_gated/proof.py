"""The cases on which the kernels of gated activations are proven."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from jtbridge.kernels._proving import Case, dtypes, normal

from .op import differentiable_kernel, geglu, swiglu


def cases() -> Iterator[Case]:
    """Yield the cases."""
    functions = {
        "swiglu": swiglu,
        "geglu": geglu,
        "geglu by erf": functools.partial(geglu, approximate="none"),
        # The kernel that replaces a chain of torch operators: the activation is rounded before the product.
        "swiglu, rounded": differentiable_kernel("silu", rounded=True),
    }
    for dtype in dtypes():
        for shape in ((3, 5), (4, 4096), (7, 1000)):
            for name, function in functions.items():
                arrays = [2 * normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1)]
                yield Case(f"{name} of {shape}, {dtype}", function, arrays, (0, 1))
