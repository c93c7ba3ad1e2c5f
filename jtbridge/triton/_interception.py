"""Interception of launches of Triton kernels, for code that must not import Triton."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def intercepted_launches() -> Iterator[list[str]]:
    """Replace this thread's launches of Triton kernels by torch operators inside the block.

    Yields a list to which the names of the launched kernels are added. While Triton is not imported no kernel exists,
    and nothing is imported here. If Triton is first imported inside the block, its launches are not replaced.
    """
    if "triton.runtime.jit" not in sys.modules:
        yield []
        return
    from .launches._interception import patched_launches

    with patched_launches() as launched:
        yield launched


def with_intercepted_launches(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` with its launches of Triton kernels replaced by operators."""

    @functools.wraps(call)
    def run(*tensors: Any) -> Any:
        with intercepted_launches():
            return call(*tensors)

    return run
