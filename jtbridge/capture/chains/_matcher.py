"""Recorded calls of torch functions, and the search for a chain among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from jtbridge._compat import write_count

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # the dtypes that the kernels take

Match = Callable[[], torch.Tensor]  # calls the fused operator on the arguments of the chain


class NoMatch(Exception):
    """The recorded calls are not the chain that the matcher looks for."""


@dataclasses.dataclass(eq=False, slots=True)
class RecordedCall:
    """A call of a torch function that returned one tensor, and the state of the tensors at that time."""

    name: str
    args: tuple[Any, ...]
    grad_enabled: bool
    input_states: list[tuple[torch.Tensor, Any]]  # the argument tensors, and their states at the call
    result_state: Any  # the state of the result at the call
    uses: int = 0  # how often later calls took the result

    @classmethod
    def now(
        cls, name: str, args: tuple[Any, ...], inputs: Iterable[torch.Tensor], result: torch.Tensor
    ) -> RecordedCall:
        """Return the record of a call that has just returned `result`."""
        return cls(name, args, torch.is_grad_enabled(), [(x, _state_of(x)) for x in inputs], _state_of(result))

    def is_valid(self, result: torch.Tensor) -> bool:
        """Return whether the call would return the same now.

        This is so if no tensor of the call was written to or detached since, and gradient recording has not changed.
        """
        return (
            self.grad_enabled == torch.is_grad_enabled()
            and _state_of(result) == self.result_state
            and all(_state_of(tensor) == state for tensor, state in self.input_states)
        )


def _state_of(x: torch.Tensor) -> Any:
    """Return a state that changes if a tensor is written to or gets another autograd history.

    ``detach_`` and an ``autograd.Function`` can change the history of a tensor.
    """
    return write_count(x), x.grad_fn, x.requires_grad


class Matcher:
    """A search backwards from the last call of a possible chain.

    Args:
        calls: the recorded calls, by their results.
    """

    def __init__(self, calls: MutableMapping[torch.Tensor, RecordedCall]):
        self._calls = calls
        # The inner calls of the chain, and how often the chain itself uses the result of each.
        self.inner: dict[RecordedCall, int] = {}

    def sees(self, value: Any, name: str) -> bool:
        """Return whether a value is the result of a recorded call of this name."""
        return self._call(value, name) is not None

    def __call__(self, value: Any, name: str, *, hidden: bool = True, uses: int = 1) -> tuple[Any, ...]:
        """Return the arguments of the recorded call of this name that returned a value.

        With `hidden`, the value is an inner value of the chain, and the chain uses it `uses` times.
        """
        call = self._call(value, name)
        if call is None:
            raise NoMatch
        if hidden:
            self.inner[call] = min(uses, self.inner.get(call, uses))
        return call.args

    def both_ways(self, value: Any, name: str) -> Iterator[tuple[Any, Any]]:
        """Yield the two arguments of a call whose order does not matter, in both orders."""
        a, b = self(value, name)
        yield a, b
        yield b, a

    def unwidened(self, value: torch.Tensor) -> torch.Tensor:
        """Return the half-precision tensor from which a float32 tensor was converted, or else the tensor itself.

        The float32 tensor is not an inner value of the chain: if it has other uses, the conversion is done once more.
        """
        if self.sees(value, "cast"):
            (source,) = self(value, "cast", hidden=False)
            if value.dtype is torch.float32 and source.dtype in FLOATS:
                return source
        return value

    def demand(self, condition: bool) -> None:
        """Raise NoMatch unless a condition holds."""
        if not condition:
            raise NoMatch

    def demand_norm(self, x: torch.Tensor, weight: Any) -> None:
        """Raise NoMatch unless a norm's kernel takes `x` and `weight`, which has the size of the last axis."""
        self.demand(isinstance(weight, torch.Tensor) and x.dtype in FLOATS and x.numel() > 0)
        self.demand(weight.dtype is x.dtype and weight.shape == x.shape[-1:])

    def _call(self, value: Any, name: str) -> RecordedCall | None:
        call = self._calls.get(value) if isinstance(value, torch.Tensor) else None
        return call if call is not None and call.name == name and call.is_valid(value) else None


# Each of these functions takes the arguments of a torch function and returns the arguments that are recorded. If it
# raises a TypeError, the call is not recorded.


def _one(x: Any) -> tuple[Any, ...]:
    return (x,)


def _two(x: Any, y: Any) -> tuple[Any, ...]:
    return x, y


def _mean(x: Any, dim: Any = None, keepdim: bool = False) -> tuple[Any, ...]:
    return x, dim, keepdim


def _pow(x: Any, exponent: Any) -> tuple[Any, ...]:
    if not isinstance(exponent, float | int) or exponent not in _POWERS:
        raise TypeError("not part of a chain")
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


def _log_softmax(x: Any, dim: Any, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    if dtype is not None or not isinstance(_stacklevel, int):
        raise TypeError("it converts")
    return x, dim


def _every_argument(x: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
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
    ("log_softmax", _log_softmax, (F.log_softmax, _T.log_softmax, torch.log_softmax)),
    ("view", _every_argument, (_T.view, _T.reshape)),
    ("cast", _every_argument, (_T.to, _T.float, _T.half, _T.bfloat16, _T.type_as)),
)
_POWERS = {2: "square", 3: "cube", -0.5: "rsqrt"}
_BY_FUNCTION = {function: (name, parse) for name, parse, functions in _FUNCTIONS for function in functions}


def parsed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> tuple[str, Any] | None:
    """Return the name and the arguments to record for a call of a torch function; None if it is not recorded."""
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
        x = given[0]
        only_casts = isinstance(x, torch.Tensor) and x.dtype is not out.dtype and x.device == out.device
        return (name, given[:1]) if only_casts else None
    return name, given
