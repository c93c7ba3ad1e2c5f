"""Result types of a function inside which sizes or Python values depend on data.

``x[mask].sum()`` has a static shape though ``x[mask]`` has none. The function is traced on fake tensors with symbols
for such sizes. Where Python needs the value of a symbol (``if n > 2``, ``range(n)``, a branch on a tensor) the trace
gets one of two values as the answer, and other traces get the other value. If all traces that do not raise return
results of the same static types, these are the result types for all data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from jtbridge._compat import (
    DynamicOutputShapeException,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    known_size,
    unbacked_fake_mode,
)
from jtbridge.core.array_types import is_dense
from jtbridge.core.runner import escaped_tensor_error
from jtbridge.errors import JtbridgeError

from ._frames import user_line
from ._path_outcomes import DependentTensor
from .modes.effects import EndlessLoopError
from .rewrites.least_squares import LEAST_SQUARES, least_squares_results

_MAX_TRACES = 6  # the most traces of one function
_MAX_READS = 32  # the most answers in one trace: a loop whose end depends on data may never end
_INTEGERS = (2, 3, 1, 0)
_FLOATS = (1.5, 0.5)

# Torch's symbolic shapes and dtypes of these operators are wrong (2.13).
_WITH_WRONG_SHAPES = frozenset({torch.ops.aten._pack_padded_sequence.default})

Result = TypeVar("Result")


class PathTrace:
    """The fake mode of one trace, and the values that it assumes where the function reads a value that depends on data.

    Args:
        choices: for each of the first reads, in order, the number of the assumed value: 0 or 1.
        rest: the number of the assumed value for all later reads.
    """

    def __init__(self, choices: Sequence[int], rest: int):
        self.choices: list[int] = []  # the numbers of the answers given so far
        self.mode: FakeTensorMode = unbacked_fake_mode(self._answer, lambda: self._operators.place())
        self._given = choices
        self._rest = rest
        self._over = False
        self._operators = _CurrentOperator()

    def watching(self) -> TorchDispatchMode:
        """Return the mode that records which operator makes a size."""
        return self._operators

    def again(self) -> PathTrace:
        """Return a new trace that gives the symbols the same values."""
        return PathTrace(self._given, self._rest)

    def over(self) -> None:
        """End the trace. Afterwards, code that reads the value of a symbol raises: the function stored the symbol."""
        self._over = True

    def type_of(self, leaf: Any) -> Any:
        """Return a tensor of the type of a result; a DependentTensor if its sizes depend on data."""
        for number, dtype in _NUMBERS.items():
            if isinstance(leaf, number):
                return torch.empty((), dtype=dtype)
        if not isinstance(leaf, torch.Tensor) or not is_dense(leaf):
            return leaf
        sizes = [known_size(self.mode, size) for size in leaf.shape]
        shape = tuple(f"comes from {size}" if isinstance(size, str) else size for size in sizes)
        if any(isinstance(size, str) for size in shape):
            return DependentTensor(shape, leaf.dtype)
        with FakeTensorMode():
            return torch.empty(shape, dtype=leaf.dtype, device=leaf.device)  # type: ignore[arg-type]

    def _answer(self, kind: type, low: int | None, high: int | None) -> Any:
        if self._over:
            raise escaped_tensor_error()
        number = len(self.choices)
        if number >= _MAX_READS:
            raise RuntimeError(f"it reads more than {_MAX_READS} values that depend on data")
        answers = _answers(kind, low, high)
        choice = self._given[number] if number < len(self._given) else self._rest
        self.choices.append(min(choice, len(answers) - 1))
        return answers[self.choices[-1]]


_NUMBERS = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64, torch.SymBool: torch.bool}


def _answers(kind: type, low: int | None, high: int | None) -> tuple[Any, ...]:
    """Return at most two possible values of a number of some type, between bounds."""
    if kind is bool:
        return True, False
    if kind is float:
        return _FLOATS
    bounds = [bound for bound in (low, high) if bound is not None]
    possible = [n for n in (*_INTEGERS, *bounds) if (low is None or n >= low) and (high is None or n <= high)]
    return tuple(dict.fromkeys(possible))[:2]


def explored(run: Callable[[PathTrace], Result], most: int = _MAX_TRACES) -> list[Result]:
    """Return the results of `run` for several paths through a function, without those that raise.

    Args:
        run: traces the function once.
        most: the greatest number of traces. The first two give the first and the second answer to all questions; each
            of the others differs from the first trace in one answer.

    Raises:
        JtbridgeError: a trace raised it.
        EndlessLoopError: a trace computes numbers from symbols for too long.
        BaseException: the exception of the first trace, if all traces raise.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def attempt(choices: Sequence[int], rest: int) -> list[int]:
        trace = PathTrace(choices, rest)
        try:
            results.append(run(trace))
        except (JtbridgeError, EndlessLoopError):  # another trace may run as long
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  (torch raises on such data too, or tracing fails)
            errors.append(error)
        finally:
            trace.over()
        return trace.choices

    first = attempt((), 0)
    if first and most > 1:
        attempt((), 1)
        for number in range(min(len(first), most - 2)):
            attempt((*first[:number], 1), 0)
    if not results:
        raise errors[0]
    return results


class _CurrentOperator(TorchDispatchMode):
    """Records which operator is running.

    Refuses the operators in `_WITH_WRONG_SHAPES`, and gives ``lstsq`` its result types, which torch does not infer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._running: OpOverload | None = None

    def place(self) -> str:
        """Return the operator and the line of the user's code that is running."""
        line = user_line()
        return f"`{self._running}`" + (f" at {line}" if line else "")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in _WITH_WRONG_SHAPES:
            raise DynamicOutputShapeException(func)
        self._running = func
        if func is LEAST_SQUARES:
            results = least_squares_results(*args, **(kwargs or {}))
            if results is not None:
                return results
        return func(*args, **(kwargs or {}))
