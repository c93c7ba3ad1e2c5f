"""Tests for calls from inside a running wrapped function, and from inside a callback of XLA.

Inside a running wrapped function, a wrapped function is a plain torch function. Inside a JAX function that torch code
calls, it is a JAX function again. Inside a callback of XLA, JAX must not be called: the call may wait for the
thread that it runs on.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from jtbridge._compat import (
    Context,
    current_context,
    is_transforming,
    refusing_jax,
    run_outside_transforms,
    with_autograd,
)
from jtbridge.errors import JaxCallError

from .backend_names import WITHOUT_KERNELS
from .messages import text_of
from .process_end import CALLBACK_THREADS

_RUNNING = threading.local()
_MIN_NORMAL = sys.float_info.min
# The text of JAX's errors about an argument that is not an array.
_OF_JAX = re.compile("requires ndarray or scalar arguments|Error interpreting argument|is not a valid JAX type")


def setting_inside(call: Callable[..., Any], *, inside: bool = True) -> Callable[..., Any]:
    """Return `call`, the user's torch function, with :func:`is_inside` true on its thread while it runs.

    With `inside` false, `call` is the user's JAX function, and :func:`is_inside` is false.
    """

    @functools.wraps(call, assigned=(), updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        before = getattr(_RUNNING, "inside", False)
        _RUNNING.inside = inside
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            if "Creating a new Tensor subclass" in text_of(error):
                error.add_note(
                    "Torch cannot construct such an object while jtbridge watches the function: make it outside of the "
                    "function, and let the function refer to it."
                )
            raise
        except TypeError as error:
            if inside and _OF_JAX.search(text_of(error)) and "torch." in text_of(error):
                error.add_note(
                    "Inside a torch function, JAX got a tensor. Compute with torch there, or call the JAX function as "
                    "`jtbridge.to_torch_function(f)`."
                )
            raise
        finally:
            _RUNNING.inside = before

    return run


def is_inside() -> bool:
    """Return whether a wrapped function is running, or being traced, on this thread."""
    return getattr(_RUNNING, "inside", False)


def _flushes_subnormals() -> bool:
    """Return whether this thread treats subnormal numbers as zero. Torch can set this mode, but not query it."""
    return _MIN_NORMAL / 2 == 0.0


def as_xla_callback(callback: Callable[..., Any]) -> Callable[..., Any]:
    """Return `callback` for XLA: while it runs, :func:`is_in_callback` is true on its thread, and calls of JAX raise.

    XLA's threads treat subnormal numbers as zero. The callback treats them as the thread that calls this function does.
    """
    refusing = refusing_jax(_jax_call_error, callback)
    outside = run_outside_transforms(refusing)
    flushes = _flushes_subnormals()

    def run(*args: Any) -> Any:
        before = getattr(_RUNNING, "callback", False)
        switched = _flushes_subnormals() is not flushes
        _RUNNING.callback = True
        if not before:
            CALLBACK_THREADS.add(threading.get_ident())
        if switched:
            torch.set_flush_denormal(flushes)
        try:
            with with_autograd():  # this thread may run the implementation of an operator, where autograd is off
                return outside(*args) if is_transforming() else refusing(*args)
        finally:
            if switched:
                torch.set_flush_denormal(not flushes)
            _RUNNING.callback = before
            if not before:
                CALLBACK_THREADS.discard(threading.get_ident())

    return run


def refusing_jax_in_program(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return `call`, a run of a torch function on examples. While JAX traces a program, it raises if it uses JAX.

    The program may call the torch function in a callback, where JAX cannot run.
    """
    return refusing_jax(_jax_call_error, call) if current_context() is Context.STAGED else call


def _jax_call_error(operation: str) -> JaxCallError:
    return JaxCallError(
        f"A torch function that a JAX program calls uses JAX (`{operation}`). JAX cannot run inside a callback of its "
        "own: the call could wait for ever. Call the torch function outside of `jax.jit`, compute with torch instead, "
        "or let the function be translated, with `jtbridge.to_torch_function` around the part in JAX "
        f'(`jtbridge.wrap(f, backend="{WITHOUT_KERNELS}")` says what prevents a translation).'
    )


def is_in_callback() -> bool:
    """Return whether XLA called the code that runs on this thread."""
    return getattr(_RUNNING, "callback", False)
