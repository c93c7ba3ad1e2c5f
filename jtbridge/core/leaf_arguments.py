"""Arguments that are leaves of torch's graph to a function, and not to the autograd that differentiates it.

Autograd gives a function copies of its leaves, because the function may write to its arguments, or tensors that other
operators computed. In a plain call the arguments are leaves: their ``.grad`` is what backward computes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import add_gradient_hook, innermost, inside_functorch, is_graph_leaf, requiring_gradient
from jtbridge.errors import DifferentiationError

from .inner_autograd import runs_backward


class LeafArguments:
    """Arguments of a run that are leaves to the function: what torch stores for leaves only, by tensor."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._of_batches: list[torch.Tensor] = []  # inside torch.vmap, the tensors that it wraps
        self._gradients: dict[int, torch.Tensor] = {}  # by the ids of the tensors
        self._detached: set[int] = set()  # the ids of tensors that were not leaves and stopped requiring a gradient

    def __contains__(self, tensor: object) -> bool:
        return any(tensor is known for known in self._tensors)

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add the tensors that require a gradient. Inside torch.vmap they only have no `grad_fn`."""
        if inside_functorch():
            self._of_batches += requiring_gradient([innermost(tensor) for tensor in tensors])
        else:
            self._tensors += requiring_gradient(tensors)

    def gradient(self, tensor: torch.Tensor, *owner: Any) -> torch.Tensor | None:
        """Return ``tensor.grad``."""
        return self._gradients.get(id(tensor))

    def set_gradient(self, tensor: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Set or delete ``tensor.grad``."""
        if gradient is None:
            self._gradients.pop(id(tensor), None)
        else:
            self._gradients[id(tensor)] = gradient

    def set_requires_grad(self, tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        """Set ``tensor.requires_grad``. With False, the derivative by the argument is zero from here on."""
        if requires_grad and id(tensor) in self._detached:
            raise DifferentiationError(
                "The function sets `requires_grad` of an argument to False and then to True, so that only a part of "
                "its operations have a derivative by the argument. Use `x.detach()` where no gradient is wanted."
            )
        if is_graph_leaf(tensor):
            return tensor.requires_grad_(requires_grad)
        if not requires_grad:
            tensor.detach_()
            self._detached.add(id(tensor))
        return tensor

    def answer_to(self, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Return whether a call of a torch function asks for what torch stores for leaves, of one of the arguments."""
        if func not in _OF_LEAVES or not args:
            return False
        if inside_functorch():
            return func in _GRAPH_QUESTIONS and any(args[0] is known for known in self._of_batches)
        return args[0] in self

    def answer(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of such a call."""
        return _OF_LEAVES[func](self, *args, **kwargs)

    @contextlib.contextmanager
    def storing_gradients(self) -> Iterator[None]:
        """Store the gradients that a call of backward inside the block computes."""
        handles = [
            add_gradient_hook(tensor, functools.partial(self._accumulate, tensor))
            for tensor in requiring_gradient(self._tensors)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for tensor in self._tensors:
                tensor.grad = None  # which `inputs=` stored, and which would refer to the tensor's own graph

    def _accumulate(self, tensor: torch.Tensor, gradient: torch.Tensor) -> None:
        before = self._gradients.get(id(tensor))
        self._gradients[id(tensor)] = gradient if before is None else before + gradient


_GRAPH_QUESTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.is_leaf.__get__: lambda arguments, *given: True,  # type: ignore[attr-defined]
    torch.Tensor.grad_fn.__get__: lambda arguments, *given: None,  # type: ignore[attr-defined]
}
_OF_LEAVES: dict[Callable[..., Any], Callable[..., Any]] = {
    **_GRAPH_QUESTIONS,
    torch.Tensor.grad.__get__: LeafArguments.gradient,  # type: ignore[attr-defined]
    torch.Tensor.grad.__set__: LeafArguments.set_gradient,  # type: ignore[attr-defined]
    torch.Tensor.grad.__delete__: LeafArguments.set_gradient,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__set__: LeafArguments.set_requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad_: LeafArguments.set_requires_grad,
}


class LeafArgumentsMode(TorchFunctionMode):
    """A mode in which some tensors are leaves to a function."""

    def __init__(self, arguments: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._arguments = LeafArguments()
        self._arguments.add(arguments)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._arguments.answer_to(func, args):
            return self._arguments.answer(func, args, kwargs)
        with self._arguments.storing_gradients() if runs_backward(func) else contextlib.nullcontext():
            return func(*args, **kwargs)
