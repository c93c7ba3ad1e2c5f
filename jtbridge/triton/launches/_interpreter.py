"""Interpretation of Triton kernels on a CPU, by Triton's interpreter.

Triton itself interprets only in a process that was started with ``TRITON_INTERPRET=1``. This file interprets kernels
that were defined to be compiled. The interpreter replaces functions of `triton.language`; they are restored afterwards.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
import types
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from jtbridge.errors import LaunchError
from jtbridge.triton._interpreter import LANGUAGE_LOCK, fixed_interpreter, scalar_range
from jtbridge.triton._ir import LANGUAGE_TYPES, jit_function, scalar_type

from ._launch import Launch
from ._libdevice import interpreted_library


def interpret(launch: Launch, memories: Sequence[torch.Tensor]) -> None:
    """Run a kernel on memories of a CPU, which the kernel modifies."""
    with LANGUAGE_LOCK:
        _interpret(launch, memories)


def _interpret(launch: Launch, memories: Sequence[torch.Tensor]) -> None:
    from triton.runtime.errors import InterpreterError
    from triton.runtime.interpreter import GridExecutor

    arguments = launch.arguments(memories)
    (configuration, *_) = launch.configurations(arguments)
    grid = launch.grid_of(configuration, arguments)
    function = jit_function(launch.kernel)
    python_function = _python_function(function)
    arguments = {**launch.evaluated_arguments(memories), **configuration.constants}
    parameters = {p.name: p for p in function.params if not p.is_constexpr}
    with _interpreted_language(), fixed_interpreter():
        converted = {
            name: _number_as_tensor(parameters[name], x) if name in parameters else x for name, x in arguments.items()
        }
        try:
            GridExecutor(python_function, function.arg_names, grid)(**converted)
        except InterpreterError as error:
            raise _kernel_failure(function, error.__cause__ or error) from error.__cause__


def _kernel_failure(function: Any, cause: BaseException) -> LaunchError:
    """Return an error that describes a failure in a kernel, with the file and line."""
    file = function.fn.__code__.co_filename
    lines = [line for frame, line in traceback.walk_tb(cause.__traceback__) if frame.f_code.co_filename == file]
    place = f" at {file}:{lines[-1]}" if lines else ""
    return LaunchError(
        f"Kernel `{function.__name__}` failed in Triton's interpreter, which runs kernels on a CPU,{place}: "
        f"{type(cause).__name__}: {cause}"
    )


def _number_as_tensor(parameter: Any, value: Any) -> Any:
    """Return a number as a tensor of the parameter's type. The interpreter would pass a float, which has no ``.to``."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if not isinstance(value, bool | int | float):
        return value
    name = LANGUAGE_TYPES[scalar_type(parameter, value)]
    dtype, numpy_type = getattr(tl, name), {"int1": bool, "bfloat16": ml_dtypes.bfloat16}.get(name, name)
    return tl.tensor(TensorHandle(np.array([value], numpy_type), dtype), dtype)


def _python_function(function: Any) -> Any:
    """Return a kernel's Python function, rewritten to be interpreted, with its own copy of the globals."""
    from triton.runtime.interpreter import FunctionRewriter

    fn = function.fn
    namespace = {"range": scalar_range, **fn.__globals__, **inspect.getclosurevars(fn).nonlocals}
    namespace = {name: _interpreted_builtin(interpreted_library(value)) for name, value in namespace.items()}
    own = types.FunctionType(fn.__code__, namespace, fn.__name__, fn.__defaults__, fn.__closure__)
    own.__dict__.update(fn.__dict__)
    own.__annotations__ = fn.__annotations__
    own.__module__, own.__qualname__ = fn.__module__, fn.__qualname__
    return FunctionRewriter(own).rewrite_ast()


def _interpreted_builtin(value: Any) -> Any:
    """Return `value`, or the interpreter's function if `value` is a builtin of Triton that was imported by name.

    The interpreter replaces builtins in Triton's own modules only.
    """
    import triton.language as tl

    if not (inspect.isfunction(value) and tl.core.is_builtin(value) and hasattr(tl, value.__name__)):
        return value
    return lambda *args, **kwargs: getattr(tl, value.__name__)(*args, **kwargs)


@contextlib.contextmanager
def _interpreted_language() -> Iterator[None]:
    """Let kernels call each other as Python functions inside the block, and restore Triton's language afterwards."""
    import triton.language as tl
    from triton.runtime.interpreter import _patch_lang
    from triton.runtime.jit import JITFunction

    functions: dict[int, Any] = {}  # keys are `id`s, because the hash of a kernel reads `triton.language`

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        fn = functions[id(self)] = functions.get(id(self)) or _python_function(self)
        scope = _patch_lang(fn)
        try:
            return fn(*args, **kwargs)
        finally:
            scope.restore()

    places = (JITFunction, tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)
    before = [(place, dict(vars(place))) for place in places]
    JITFunction.__call__ = call
    try:
        yield
    finally:
        for place, names in before:
            for name in vars(place).keys() - names.keys():
                delattr(place, name)
            for name, value in names.items():
                if vars(place).get(name) is not value:
                    setattr(place, name, value)
