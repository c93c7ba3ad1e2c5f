"""Calls through `jax.pure_callback`: copies both ways, and works on every platform with a CPU beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.interpreters import mlir

from jtbridge._flat import TorchFunction
from jtbridge._host import reader, writer
from jtbridge._run import as_call_error, runner


class CallbackBackend:
    """Calls torch on NumPy copies."""

    name = "callback"
    way = "call"

    def unavailable(self, platform: str) -> str | None:
        del platform
        return None

    def lower(self, ctx: mlir.LoweringRuleContext, fn: TorchFunction, operands: Sequence[Any]) -> Sequence[Any]:
        result_types = tuple(jax.ShapeDtypeStruct(type_.shape, type_.dtype) for type_ in fn.out_types)
        host = numpy_callback(fn)

        def call(*arrays: jax.Array) -> Sequence[jax.Array]:
            return jax.pure_callback(host, result_types, *arrays)

        return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)

    def call(self, fn: TorchFunction, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        outs = numpy_callback(fn, as_is=True)(*arrays)
        return jax.device_put(list(outs), next((x.device for x in arrays), None))


def numpy_callback(fn: TorchFunction, *, as_is: bool = False) -> Callable[..., tuple[np.ndarray, ...]]:
    """`fn` on copies of NumPy arrays, to NumPy arrays.

    Its exceptions are turned into a form that survives XLA, unless they are to be raised `as_is`.
    """
    run = _on_copies(fn)
    if as_is:
        return run

    def callback(*arrays: Any) -> tuple[np.ndarray, ...]:
        try:
            return run(*arrays)
        except Exception as error:  # noqa: BLE001  (whatever the user's function raises)
            raise as_call_error(fn, error) from None

    return callback


def _on_copies(fn: TorchFunction) -> Callable[..., tuple[np.ndarray, ...]]:
    run = runner(fn)
    readers = [reader(type_) for type_ in fn.in_types]
    writers = [writer(type_) for type_ in fn.out_types]

    def call(*arrays: Any) -> tuple[np.ndarray, ...]:
        tensors: list[torch.Tensor] = [read(np.array(array)) for read, array in zip(readers, arrays, strict=True)]
        results = []
        for type_, write, out in zip(fn.out_types, writers, run(tensors), strict=True):
            memory = np.empty(type_.shape, type_.dtype)
            write(memory, out)
            results.append(memory)
        return tuple(results)

    return call
