"""Methods of a torch module with an argument `train` or `rng`, which `jtbridge.module` uses for itself."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from jtbridge.core.signature import parameters_of
from jtbridge.errors import ArgumentError

_MEANINGS = {"train": "sets the mode of the module", "rng": "is a JAX key"}
_KNOWN: weakref.WeakKeyDictionary[Any, dict[str, tuple[int, Any]]] = weakref.WeakKeyDictionary()  # by function


def check_own_arguments(
    module: torch.nn.Module, method: str | Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]
) -> None:
    """Raise an error if a method itself has an argument `train` or `rng`, which would not get the given value.

    Args:
        module: the torch module.
        method: its method, or a function of the module and further arguments.
        args: the positional arguments of the call.
        given: the values of `train` and `rng` in the call.
    """
    function = method if callable(method) else getattr(module, method)
    is_bound = isinstance(function, types.MethodType)
    first = int(callable(method)) + int(is_bound)
    for name, (place, default) in _own_arguments(function.__func__ if is_bound else function).items():
        if place - first < len(args) or default is given[name]:
            continue
        own = "has no value" if default is inspect.Parameter.empty else f"would be {default!r}, its default"
        raise ArgumentError(
            f"`{getattr(function, '__name__', method)}` of `{type(module).__name__}` has an argument `{name}` of its "
            f"own, which {own}: `{name}=` of a call of `jtbridge.module` {_MEANINGS[name]} and is not passed on. Pass "
            f"the method's own by position, or call `net.method(lambda model, x: model(x, {name}=...))`."
        )


def _own_arguments(function: Any) -> dict[str, tuple[int, Any]]:
    """Return the positions and the defaults of the arguments `train` and `rng` of a function."""
    try:
        if function not in _KNOWN:
            _KNOWN[function] = _read_parameters(function)
        return _KNOWN[function]
    except TypeError:  # a callable that does not support weak references
        return _read_parameters(function)


def _read_parameters(function: Any) -> dict[str, tuple[int, Any]]:
    parameters = (parameters_of(function) or {}).values()
    return {
        parameter.name: (10**6 if parameter.kind is parameter.KEYWORD_ONLY else place, parameter.default)
        for place, parameter in enumerate(parameters)
        if parameter.name in _MEANINGS and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
