"""Running a Triton kernel on a CPU, in Triton's interpreter.

Triton interprets the kernels of a process that was started with ``TRITON_INTERPRET=1``. Here one that was made to be
compiled is interpreted, and Triton is left as it was: functions of its language that the interpreter puts in place of
its own are put back.
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

from jtbridge._triton import LANGUAGE_TYPES, jit_function, number_type
from jtbridge._triton_interpreter import LANGUAGE, right_interpreter, scalar_range
from jtbridge.errors import LaunchError

from ._launch import Launch
from ._libdevice import interpreted_library


def interpret(launch: Launch, memories: Sequence[torch.Tensor]) -> None:
    """Run a kernel in memories of a CPU, which it writes to."""
    with LANGUAGE:
        _interpret(launch, memories)


def _interpret(launch: Launch, memories: Sequence[torch.Tensor]) -> None:
    from triton.runtime.errors import InterpreterError
    from triton.runtime.interpreter import GridExecutor

    launched = launch.named(memories)
    (configuration, *_) = launch.configurations(launched)
    grid = launch.grid_of(configuration, launched)
    function = jit_function(launch.kernel)
    python_function = _python_function(function)
    named = {**launch.arguments(memories), **configuration.constants}
    numbers = {p.name: p for p in function.params if not p.is_constexpr}
    with _language(), right_interpreter():
        given = {name: _number(numbers[name], x) if name in numbers else x for name, x in named.items()}
        try:
            GridExecutor(python_function, function.arg_names, grid)(**given)
        except InterpreterError as error:
            raise _failure(function, error.__cause__ or error) from error.__cause__


def _failure(function: Any, cause: BaseException) -> LaunchError:
    """What to say of an error in a kernel, with the line of its file where it was."""
    file = function.fn.__code__.co_filename
    lines = [line for frame, line in traceback.walk_tb(cause.__traceback__) if frame.f_code.co_filename == file]
    place = f" at {file}:{lines[-1]}" if lines else ""
    return LaunchError(
        f"Kernel `{function.__name__}` fails in Triton's interpreter, which runs it on a CPU,{place}: "
        f"{type(cause).__name__}: {cause}"
    )


def _number(parameter: Any, value: Any) -> Any:
    """A number of the type that a kernel is passed. The interpreter leaves a float as it is, which has no ``.to``."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if not isinstance(value, bool | int | float):
        return value
    name = LANGUAGE_TYPES[number_type(parameter, value)]
    dtype, held = getattr(tl, name), {"int1": bool, "bfloat16": ml_dtypes.bfloat16}.get(name, name)
    return tl.tensor(TensorHandle(np.array([value], held), dtype), dtype)


def _python_function(function: Any) -> Any:
    """The function that a kernel was made of, rewritten to be interpreted. Its module is not touched."""
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
    """`value`; a builtin of Triton's that a module has under a name of its own, as the interpreter has it.

    The interpreter puts its own into Triton's modules alone.
    """
    import triton.language as tl

    if not (inspect.isfunction(value) and tl.core.is_builtin(value) and hasattr(tl, value.__name__)):
        return value
    return lambda *args, **kwargs: getattr(tl, value.__name__)(*args, **kwargs)


@contextlib.contextmanager
def _language() -> Iterator[None]:
    """Kernels call each other as Python functions, and Triton's language is put back in the end."""
    import triton.language as tl
    from triton.runtime.interpreter import _patch_lang
    from triton.runtime.jit import JITFunction

    functions: dict[int, Any] = {}  # by identity: a kernel's own hash looks at the language

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
