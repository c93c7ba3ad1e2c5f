"""What a function's calls of torch made, as far as it may be part of a chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from jtbridge._compat import version_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what the kernels take

Match = Callable[[], torch.Tensor]  # the operator, on the arguments that were found


class NoMatch(Exception):
    """It is not the chain that was looked for."""


@dataclasses.dataclass(eq=False, slots=True)
class RecordedCall:
    """A call that made one tensor, and what would make its value another by now."""

    name: str
    args: tuple[Any, ...]
    grad: bool  # whether gradients were recorded
    taken: list[tuple[torch.Tensor, Any]]  # tensors, and what they were then
    made: Any  # what the result was then
    uses: int = 0  # calls that took what it made

    @classmethod
    def now(cls, name: str, args: tuple[Any, ...], tensors: Iterable[torch.Tensor], made: torch.Tensor) -> RecordedCall:
        """The step that has just been taken."""
        return cls(name, args, torch.is_grad_enabled(), [(x, _condition(x)) for x in tensors], _condition(made))

    def holds(self, made: torch.Tensor) -> bool:
        """Whether nothing was written to or cut off since, and gradients are recorded as they were."""
        return (
            self.grad == torch.is_grad_enabled()
            and _condition(made) == self.made
            and all(_condition(tensor) == then for tensor, then in self.taken)
        )


def _condition(x: torch.Tensor) -> Any:
    """What changes where a tensor is written to, or its past is: by ``detach_``, or by what an autograd.Function is."""
    return version_of(x), x.grad_fn, x.requires_grad


class Matcher:
    """A look backwards from the last call of what may be a chain."""

    def __init__(self, steps: MutableMapping[torch.Tensor, RecordedCall]):
        self._steps = steps
        self.inner: dict[
            RecordedCall, int
        ] = {}  # those whose results the chain hides, and how often it takes these itself

    def sees(self, value: Any, name: str) -> bool:
        """Whether a value was made by a step."""
        return self._step(value, name) is not None

    def __call__(self, value: Any, name: str, *, hidden: bool = True, uses: int = 1) -> tuple[Any, ...]:
        """The arguments of the step that made a value, which the chain takes so often itself if it hides it."""
        step = self._step(value, name)
        if step is None:
            raise NoMatch
        if hidden:
            self.inner[step] = min(uses, self.inner.get(step, uses))
        return step.args

    def both_ways(self, value: Any, name: str) -> Iterator[tuple[Any, Any]]:
        """Two arguments of a step whose order does not matter, in both orders."""
        a, b = self(value, name)
        yield a, b
        yield b, a

    def unwidened(self, value: torch.Tensor) -> torch.Tensor:
        """What a float32 tensor was converted from, if it was from half precision; else itself.

        It is no inner value: one more use of it is one more conversion.
        """
        if self.sees(value, "cast"):
            (source,) = self(value, "cast", hidden=False)
            if value.dtype is torch.float32 and source.dtype in FLOATS:
                return source
        return value

    def demand(self, condition: bool) -> None:
        """There is no match unless this holds."""
        if not condition:
            raise NoMatch

    def _step(self, value: Any, name: str) -> RecordedCall | None:
        step = self._steps.get(value) if isinstance(value, torch.Tensor) else None
        return step if step is not None and step.name == name and step.holds(value) else None


# A step's arguments as the functions of torch take them that make it. Others than these make no step.


def _one(x: Any) -> tuple[Any, ...]:
    return (x,)


def _two(x: Any, y: Any) -> tuple[Any, ...]:
    return x, y


def _mean(x: Any, dim: Any = None, keepdim: bool = False) -> tuple[Any, ...]:
    return x, dim, keepdim


def _pow(x: Any, exponent: Any) -> tuple[Any, ...]:
    if not isinstance(exponent, float | int) or exponent not in _POWERS:
        raise TypeError("no step by itself")
    return x, exponent


def _cat(tensors: Any, dim: int = 0) -> tuple[Any, ...]:
    return tuple(tensors), dim


def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> tuple[Any, ...]:
    return x, start_dim, end_dim


def _silu(x: Any, inplace: bool = False) -> tuple[Any, ...]:
    if inplace:
        raise TypeError("it writes")
    return (x,)


def _gelu(x: Any, approximate: str = "none") -> tuple[Any, ...]:
    return x, approximate


def _along(x: Any, dim: Any, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    if dtype is not None or not isinstance(_stacklevel, int):
        raise TypeError("it converts")
    return x, dim


def _any(x: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return (x, *args, kwargs)


_T = torch.Tensor
_FUNCTIONS: Sequence[tuple[str, Callable[..., tuple[Any, ...]], Sequence[Callable[..., Any]]]] = (
    ("mul", _two, (_T.mul, torch.mul)),
    ("add", _two, (_T.add, torch.add)),
    ("sub", _two, (_T.sub, torch.sub)),
    ("pow", _pow, (_T.pow, torch.pow, _T.__pow__)),
    ("square", _one, (_T.square, torch.square)),
    ("mean", _mean, (_T.mean, torch.mean)),
    ("rsqrt", _one, (_T.rsqrt, torch.rsqrt)),
    ("tanh", _one, (_T.tanh, torch.tanh)),
    ("neg", _one, (_T.neg, torch.neg)),
    ("cat", _cat, (torch.cat,)),
    ("stack", _cat, (torch.stack,)),
    ("flatten", _flatten, (_T.flatten, torch.flatten)),
    ("view_as_complex", _one, (torch.view_as_complex,)),
    ("view_as_real", _one, (torch.view_as_real,)),
    ("getitem", _two, (_T.__getitem__,)),
    ("silu", _silu, (F.silu,)),
    ("gelu", _gelu, (F.gelu,)),
    ("log_softmax", _along, (F.log_softmax, _T.log_softmax, torch.log_softmax)),
    ("view", _any, (_T.view, _T.reshape)),
    ("cast", _any, (_T.to, _T.float, _T.half, _T.bfloat16, _T.type_as)),
)
_POWERS = {2: "square", 3: "cube", -0.5: "rsqrt"}
_BY_FUNCTION = {function: (name, parse) for name, parse, functions in _FUNCTIONS for function in functions}


def parsed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> tuple[str, Any] | None:
    """The step that a call of torch was, and its arguments; None if it was none that is known."""
    known = _BY_FUNCTION.get(func)
    if known is None:
        return None
    name, parse = known
    try:
        given = parse(*args, **kwargs)
    except TypeError:
        return None
    if name == "mul" and given[0] is given[1]:
        return "square", given[:1]
    if name == "pow":
        return _POWERS[given[1]], given[:1]
    if name == "cast":
        return (name, given[:1]) if _only_cast(given[0], out) else None
    return name, given


def _only_cast(x: Any, out: torch.Tensor) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype is not out.dtype and x.device == out.device
