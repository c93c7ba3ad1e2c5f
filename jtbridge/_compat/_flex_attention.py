"""Torch's function and operator of `flex_attention`. Tried on torch 2.13.

The public function compiles a call of an operator that takes functions, and refuses tensors on a CPU that require a
gradient. Two names that it looks up in its module are replaced once, when a mode that calls `is_flex_attention` first
sees a call of torch. The replacements act like the originals outside the contexts below, and on other threads.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch


class _FlexAttentionSettings(threading.local):
    in_operators = False  # whether this thread traces calls as operators
    is_uncompiled = False  # whether this thread calls the operator without compiling it


_HERE = _FlexAttentionSettings()


@contextlib.contextmanager
def flex_attention_in_operators() -> Iterator[None]:
    """Make `flex_attention` on this thread call its operator without compiling it, and with gradients on a CPU."""
    before, _HERE.in_operators = _HERE.in_operators, True
    try:
        yield
    finally:
        _HERE.in_operators = before


@contextlib.contextmanager
def flex_attention_uncompiled() -> Iterator[None]:
    """Make `flex_attention` on this thread call its operator without compiling it: torch cannot under a mode."""
    before, _HERE.is_uncompiled = _HERE.is_uncompiled, True
    try:
        yield
    finally:
        _HERE.is_uncompiled = before


def is_flex_attention(func: Any) -> bool:
    """Return whether a function is the operator that ``torch.nn.attention.flex_attention.flex_attention`` calls.

    The first call replaces two names of that module, see the docstring of this file. A mode must call this function for
    every torch function that it intercepts: the public function calls others before it looks up the replaced names.
    """
    module = sys.modules.get("torch.nn.attention.flex_attention")
    if module is None or not hasattr(module, "flex_attention_hop"):  # it is being imported
        return False
    _replace_validate_device(module)
    return func is module.flex_attention_hop


def flex_attention_scores(*args: Any) -> torch.Tensor:
    """Return the attention scores after the score and mask functions, in the precision of the softmax.

    Torch batches the two functions by ``torch.vmap``.

    Args:
        args: the arguments of the operator.
    """
    from torch._higher_order_ops.flex_attention import _math_attention_inner

    return _math_attention_inner(*args)[1]


class _UncompiledFlag:
    """A flag that is true if the original flag is, and on threads that call the operator without compiling it."""

    def __init__(self, original: Any):
        self._original = original

    def __bool__(self) -> bool:
        return _HERE.in_operators or _HERE.is_uncompiled or bool(self._original)


@functools.cache
def _replace_validate_device(module: Any) -> None:
    check = module._validate_device

    @functools.wraps(check)
    def validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if not _HERE.in_operators:
            check(query, key, value)

    module._validate_device = validate_device
    module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = _UncompiledFlag(module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG)
