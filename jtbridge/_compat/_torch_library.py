"""Dispatch of an operator below autograd, and state of torch that an autograd kernel reads. Tried on torch 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch._C._dynamo.eval_frame as dynamo

Function = TypeVar("Function", bound=Callable[..., Any])

# Disables the autograd kernels of this thread in a block. `torch.library.register_autograd` uses it; it has no public
# counterpart, and `register_autograd` itself has no forward mode.
below_autograd: Callable[[], Any] = torch._C._AutoDispatchBelowAutograd  # type: ignore[attr-defined]


def redispatch_below_autograd(operator: Any, keyset: Any, *args: Any) -> Any:
    """Call an operator with the dispatch keys of `keyset` that follow autograd's."""
    with below_autograd():
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)  # type: ignore[attr-defined]


def outside_dynamo(function: Function) -> Function:
    """Stop TorchDynamo from compiling a function and its callees when the function runs as Python; return the function.

    After a graph break, TorchDynamo compiles each Python frame that runs, also JAX's. `torch.compiler.disable` does the
    same as this function, but imports torch._dynamo, which takes a second. Tried on torch 2.13.
    """
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
    return function


def mark_constant_for_dynamo(function: Callable[..., Any]) -> None:
    """Make torch.compile run a function while it traces, and treat its result as a constant.

    This is `torch.compiler.assume_constant_result` without its import of torch._dynamo, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


_SingleLevel: Any = torch.autograd.function._SingleLevelFunction


class SingleLevelFunction(_SingleLevel):
    """The base class of ``torch.autograd.Function``, with the attribute of that class that compiled autograd needs.

    Its `apply` handles one level of torch.func, as an autograd kernel must. ``Function.apply`` would handle all levels
    again, and raises.
    """

    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)  # type: ignore[attr-defined]


@contextlib.contextmanager
def single_level_allowed() -> Iterator[None]:
    """Allow `SingleLevelFunction.apply` inside torch.func, as torch does where it processes one level."""
    import torch._C._functorch as functorch

    before = functorch.get_single_level_autograd_function_allowed()
    functorch.set_single_level_autograd_function_allowed(True)
    try:
        yield
    finally:
        functorch.set_single_level_autograd_function_allowed(before)


@contextlib.contextmanager
def recording_outer_levels() -> Iterator[None]:
    """Turn gradient recording on again inside the `forward` of a `SingleLevelFunction`, for the outer levels."""
    with torch.enable_grad(), torch.autograd.forward_ad._set_fwd_grad_enabled(True):
        yield


_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)  # type: ignore[attr-defined]
for _name in ("AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
    _AUTOGRAD = _AUTOGRAD | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _name))


def recording_in_operators() -> contextlib.AbstractContextManager[None]:
    """Return a context in which autograd records the operators in the implementation of an operator."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded - _AUTOGRAD)


def with_autograd() -> contextlib.AbstractContextManager[None]:
    """Return a context in which autograd records, also if the thread runs the implementation of an operator."""
    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)  # type: ignore[attr-defined]
    return recording_in_operators() if is_excluded else contextlib.nullcontext()
