"""Calls through `jax.pure_callback`, with copies both ways, on every platform whose host has a CPU for torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jax.interpreters import mlir

from jtbridge._compat import is_divided, replicated, run_outside_transforms
from jtbridge.core.functions import TorchFunction
from jtbridge.core.gpu_errors import add_host_note
from jtbridge.core.host_memory import placed, reader, writer
from jtbridge.core.nested_calls import as_xla_callback
from jtbridge.core.runner import as_call_error, runner
from jtbridge.errors import BackendError

from ._base import Backend, has_assumed_empty_results
from ._wide_arrays import carried, from_words, pack, to_words, unpack


class CallbackBackend(Backend):
    """The backend that calls torch on NumPy copies."""

    name = "callback"
    kind = "call"
    preference = 40
    uses_kernels = False
    on_host = True

    def lower(self, ctx: mlir.LoweringRuleContext, fn: TorchFunction, operands: Sequence[Any]) -> Sequence[Any]:
        def call(*arrays: jax.Array) -> list[jax.Array]:
            callback = io_callback if has_assumed_empty_results(fn) else jax.pure_callback
            return call_on_host(fn, callback, arrays)

        try:
            results = mlir.lower_fun(call, multiple_results=True)(ctx, *operands)
        except ValueError as error:
            if "lowering platform" not in str(error):
                raise
            raise BackendError(
                f"`{fn.base.name}` is called by the program, not translated, and JAX lowers such a call only for a "
                "platform of this process. Lower the program in a process that has the platform, or change what "
                "`jtbridge.explain` gives as the reason why the function is not translated."
            ) from error
        return replicated(ctx, results) if is_divided(ctx) else results

    @run_outside_transforms
    def call(self, fn: TorchFunction, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        outs = numpy_callback(fn, as_is=True)(*arrays)
        return placed(outs, arrays)


def call_on_host(
    fn: TorchFunction, callback: Callable[..., Any], arrays: Sequence[jax.Array], device: str = "cpu"
) -> list[jax.Array]:
    """Run `fn` on a device through one of JAX's callbacks, ``callback(host function, result types, *arrays)``."""
    host = numpy_callback(fn, device)

    def on_words(*words: Any) -> tuple[np.ndarray, ...]:
        results = host(*map(from_words, map(np.asarray, words), fn.in_types))
        return tuple(map(to_words, results, fn.out_types))

    words = callback(as_xla_callback(on_words), tuple(map(carried, fn.out_types)), *map(pack, arrays, fn.in_types))
    return list(map(unpack, words, fn.out_types))


def numpy_callback(
    fn: TorchFunction, device: str = "cpu", *, as_is: bool = False
) -> Callable[..., tuple[np.ndarray, ...]]:
    """Return a function that runs `fn` on copies of NumPy arrays on a device and returns NumPy arrays.

    Exceptions of `fn` are converted to a form that XLA passes on, or raised unchanged with `as_is`.
    """
    run = _host_function(fn, device)

    def callback(*arrays: Any) -> tuple[np.ndarray, ...]:
        try:
            return run(*arrays)
        except BaseException as error:
            add_host_note(error)
            if as_is:
                raise
            raise as_call_error(fn, error) from None

    return callback


def _host_function(fn: TorchFunction, device: str) -> Callable[..., tuple[np.ndarray, ...]]:
    run = runner(fn)
    readers = [reader(type_) for type_ in fn.in_types]
    writers = [writer(type_) for type_ in fn.out_types]

    def call(*arrays: Any) -> tuple[np.ndarray, ...]:
        outs = run(lambda: [read(np.array(array)).to(device) for read, array in zip(readers, arrays, strict=True)])
        results = []
        for type_, write, out in zip(fn.out_types, writers, outs, strict=True):
            memory = np.empty(type_.shape, type_.dtype)
            write(memory, out)
            results.append(memory)
        return tuple(results)

    return call


BACKENDS = (CallbackBackend(),)
