"""The text of a tensor, as `repr`, `str` and f-strings return it, while a function is traced.

The text shows values, and a traced tensor has no values. The text does not matter in a message that is printed or
logged. To test whether it matters, a function is traced once more with another text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import FakeTensor

_FORMATTING = frozenset({torch.Tensor.__repr__, torch.Tensor.__format__})
_VALUES = "tensor([-0.123456789e+05, nan, inf, True, False])"  # contains what a function may search for


def is_text(func: Any, args: tuple) -> bool:
    """Return whether the call of a torch function returns the text of a tensor without values."""
    return func in _FORMATTING and isinstance(args[0], FakeTensor)


class AlteredReprMode(TorchFunctionMode):
    """Gives each tensor without values another text than torch does, and a new one each time."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not is_text(func, args):
            return out
        self._count += 1
        return f"{out} {_VALUES} {self._count}"
