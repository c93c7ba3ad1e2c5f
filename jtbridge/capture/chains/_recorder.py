"""Detection of chains of operators among the torch calls of a function, while the function runs.

The function runs unchanged, so that torch's autograd sees the same `detach`, `no_grad` and `autograd.Function` as
without the recorder. Only the last call of a chain returns another tensor: the result of the fused operator on the
chain's arguments. Torch then takes the derivative of the fused operator. The results of the chain's earlier calls have
no more uses, so these calls are removed from the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from jtbridge._compat import any_autocast, has_saved_tensor_hooks, in_forward_mode, inside_functorch

from . import _centered_norm, _cross_entropy, _gated, _rms_norm, _rope
from ._matcher import Match, Matcher, NoMatch, RecordedCall, parsed

# The functions ``(matcher, result, *arguments)`` that match a chain, by the name of its last call. Two arguments are
# tried in both orders. Longer chains come first: an RMS norm of a centered value may end with the same call as the norm
# that centers the value.
_ENDS: dict[str, tuple[Callable[..., Match], ...]] = {
    "mul": (
        _centered_norm.centered_in_float32,
        _rms_norm.rounded_first,
        _rms_norm.scaled_in_float32,
        _rms_norm.unscaled_in_float32,
        _gated.gated_product,
    ),
    "add": (_rope.embedded,),
    "flatten": (_rope.complex_in_float32,),
    "cast": (
        _centered_norm.centered_rounded,
        _rms_norm.rounded_last,
        _rms_norm.unscaled_rounded,
        _rope.through_float32,
        _rope.complex_rounded,
    ),
}
# Torch functions that are a chain by themselves. Each is matched from its arguments.
_WHOLE: dict[Any, Callable[..., Match]] = {
    torch.nn.functional.cross_entropy: _cross_entropy.cross_entropy_call,
    torch.nn.functional.nll_loss: _cross_entropy.in_two,
    torch.nn.functional.rms_norm: _rms_norm.rms_norm_call,
}

# Accesses that show the autograd history of a tensor, or that give or replace its memory without autograd.
_HISTORY = (torch.Tensor.grad_fn.__get__, torch.Tensor.data.__get__, torch.Tensor.data.__set__)  # type: ignore[attr-defined]


class CallRecorder(TorchFunctionMode):
    """A mode that records calls of torch functions, and replaces the last call of a chain by the fused operator.

    Args:
        unfused: the numbers of the chains that are not replaced. Chains are numbered in the order in which they are
            found.
    """

    def __init__(self, unfused: Collection[int]):
        super().__init__()
        self._unfused = unfused
        self._calls: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by result
        self._found = 0
        self._hidden: dict[int, dict[RecordedCall, int]] = {}  # the inner calls of each replaced chain, by its number
        self.replaced = False  # whether any chain was replaced
        self.misused: set[int] = set()  # numbers of the replaced chains with an inner value that is used elsewhere
        self.reads_history = False  # whether the function makes one of the accesses in `_HISTORY`

    def __exit__(self, *error: Any) -> None:
        """Find the misused chains, and drop the recorded calls, which would keep their arguments alive."""
        super().__exit__(*error)
        self.misused = {i for i, inner in self._hidden.items() if any(call.uses > own for call, own in inner.items())}
        self._hidden.clear()
        self._calls = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HISTORY:
            shown = func(*args, **kwargs)
            self.reads_history |= shown is not None or func.__name__ == "__set__"
            return shown
        if self._cannot_match():
            self._note_uses(args, kwargs)
            return func(*args, **kwargs)
        whole = _WHOLE.get(func)
        if whole is not None:
            match = self._matched(lambda matcher: whole(matcher, *args, **kwargs))
            self._note_uses(args, kwargs)
            return func(*args, **kwargs) if match is None else match()
        out = func(*args, **kwargs)
        if any(x is out for x in args):  # such as a conversion of a tensor to the dtype that it has
            return out
        if not isinstance(out, torch.Tensor):
            if getattr(func, "__name__", "") != "__get__":  # reading a shape or a dtype is not a use
                self._note_uses(args, kwargs)
            return out
        call = None if out.is_inference() else parsed(func, args, kwargs, out)
        if call is None:
            self._note_uses(args, kwargs)
            return out
        name, arguments = call
        match = self._chain_ending_with(name, out, arguments)
        self._note_uses(args, kwargs)
        if match is not None and _alike(fused := match(), out):
            out = fused  # recorded below with the same arguments, so that it may be part of a longer chain
        self._record(name, out, arguments)
        return out

    def _cannot_match(self) -> bool:
        """Return whether no call can be matched at present.

        In forward mode, functorch transforms and autocast, the recorded arguments do not determine the result of a
        call. Hooks for saved tensors would see other residuals.
        """
        return in_forward_mode() or inside_functorch() or any_autocast() or has_saved_tensor_hooks()

    def _chain_ending_with(self, name: str, out: torch.Tensor, args: tuple[Any, ...]) -> Match | None:
        orders = [args, args[::-1]] if len(args) == 2 else [args]
        for end in _ENDS.get(name, ()):
            for order in orders:
                match = self._matched(lambda matcher, end=end, order=order: end(matcher, out, *order))
                if match is not None:
                    return match
        return None

    def _matched(self, find: Callable[[Matcher], Match]) -> Match | None:
        matcher = Matcher(self._calls)
        try:
            match = find(matcher)
        except NoMatch:
            return None
        number = self._found
        self._found += 1
        if number in self._unfused:
            return None
        self.replaced = True
        self._hidden[number] = matcher.inner
        return match

    def _record(self, name: str, out: torch.Tensor, args: tuple[Any, ...]) -> None:
        inputs = list(_nested_tensors(args))
        if not any(x.is_inference() for x in inputs):
            self._calls[out] = RecordedCall.now(name, args, inputs, out)

    def _note_uses(self, args: Any, kwargs: Any) -> None:
        for tensor in _nested_tensors((args, kwargs)):
            call = self._calls.get(tensor)
            if call is not None:
                call.uses += 1


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and strides, so that later calls do the same with both."""
    return a.dtype is b.dtype and a.shape == b.shape and a.stride() == b.stride()


def _nested_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from _nested_tensors(x)
    elif isinstance(value, dict):
        yield from _nested_tensors(list(value.values()))
