"""`jtbridge.to_torch_function`: a JAX function as a torch function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from jtbridge.errors import ArgumentError

from ._bound import Caller
from ._compiled import call_in_graph


def to_torch_function(f: Callable[..., Any] | None = None, *, int32: str = "int64") -> Any:
    """Make a JAX function a torch function.

    TODO
    """
    if int32 not in ("int64", "keep"):
        raise ArgumentError(f"`int32` must be 'int64' or 'keep', but it is {int32!r}.")
    if f is None:
        return lambda function: to_torch_function(function, int32=int32)
    if isinstance(f, torch.nn.Module):
        raise ArgumentError("`to_torch_function` takes a JAX function, but got a torch module. Call the module itself.")
    if not callable(f):
        raise ArgumentError(f"`to_torch_function` takes a callable, but got a {type(f).__name__}.")
    name = getattr(f, "__name__", None) or type(f).__name__
    caller = Caller(f, name, keep_int32=int32 == "keep")
    in_graph = call_in_graph(caller)

    @functools.wraps(f, updated=())
    def function(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return in_graph(args, kwargs)
        return caller(*args, **kwargs)

    return function
