"""Interception of launches of Triton kernels, for code that must not import Triton."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def intercepted_launches() -> Iterator[list[str]]:
    """Replace this thread's launches of Triton kernels by torch operators inside the block.

    Yields a list to which the names of the launched kernels are added. While Triton is not imported no kernel exists,
    and nothing is imported here. A function that first imports Triton inside the block is not seen.
    """
    if "triton.runtime.jit" not in sys.modules:
        yield []
        return
    from .launches._interception import patched_launches

    with patched_launches() as launched:
        yield launched
