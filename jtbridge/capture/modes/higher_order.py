"""A mode that traces torch's higher-order operators by calling the functions that they take.

Torch has one operator each for `flex_attention`, `torch.cond` and `while_loop`, and no dispatch mode can trace them.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch.overrides import TorchFunctionMode

from jtbridge._compat import (
    COND,
    WHILE_LOOP,
    control_flow_uncompiled,
    flex_attention_in_operators,
    is_flex_attention,
)

from .flex_attention import attention_in_operators


class HigherOrderInOperators(TorchFunctionMode):
    """Traces `flex_attention` as operators, and `torch.cond` and `while_loop` as Python's `if` and `while`.

    Attributes:
        control_flow: the name of the first control-flow operator that was called; None if there was none. Torch cannot
            differentiate these operators in forward mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.control_flow: str | None = None
        self._uncompiled = contextlib.ExitStack()

    def __enter__(self) -> Any:
        self._uncompiled.enter_context(flex_attention_in_operators())
        self._uncompiled.enter_context(control_flow_uncompiled())
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._uncompiled.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_flex_attention(func):
            return attention_in_operators(*args, **(kwargs or {}))
        if func is COND or func is WHILE_LOOP:
            self.control_flow = self.control_flow or str(func)
            func = _cond if func is COND else _while_loop
        return func(*args, **(kwargs or {}))


def _cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> Any:
    with HigherOrderInOperators():  # no mode is active inside its own `__torch_function__`
        return true_fn(*operands) if pred else false_fn(*operands)


def _while_loop(cond_fn: Any, body_fn: Any, carried_inputs: Any, additional_inputs: Any) -> Any:
    with HigherOrderInOperators():
        while cond_fn(*carried_inputs, *additional_inputs):
            carried_inputs = tuple(body_fn(*carried_inputs, *additional_inputs))
    return carried_inputs
