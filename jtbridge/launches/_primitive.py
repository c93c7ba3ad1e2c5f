"""A launch as a JAX primitive: arrays in, what the kernel makes of those that it writes out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np
import torch
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jtbridge._compat import buffer_call
from jtbridge._dtypes import torch_dtype
from jtbridge._flat import ArrayType
from jtbridge._host import reader, writer
from jtbridge._triton import jit_function, triton_call, unavailable
from jtbridge._triton_interpreter import LANGUAGE
from jtbridge.errors import LaunchError

from ._interpreter import interpret
from ._launch import Configuration, Launch
from ._rewritten import Parameters, named, rewritten, spelled, tuned

launch_p = Primitive("triton_launch")
launch_p.multiple_results = True


def launch(spec: Launch, arrays: Sequence[Any], fresh: Sequence[int]) -> list[Any]:
    """What a kernel makes of the memories that it writes.

    Args:
        spec: the launch.
        arrays: the memories that it is launched on.
        fresh: positions of arrays that it writes and whose values before that mean nothing.
    """
    types = tuple(ArrayType(x.shape, np.dtype(x.dtype)) for x in arrays)
    given = [x for i, x in enumerate(arrays) if i not in fresh]
    return launch_p.bind(*given, launch=spec, types=types, fresh=tuple(fresh))


@launch_p.def_impl
def _impl(*arrays: Any, launch: Launch, types: tuple[ArrayType, ...], fresh: tuple[int, ...]) -> list[Any]:
    return jax.jit(lambda *xs: launch_p.bind(*xs, launch=launch, types=types, fresh=fresh))(*arrays)


@launch_p.def_abstract_eval
def _abstract(*arrays: Any, launch: Launch, types: tuple[ArrayType, ...], fresh: tuple[int, ...]) -> list[ShapedArray]:
    del arrays, fresh
    return [ShapedArray(types[i].shape, types[i].dtype) for i in launch.written]


def _batch(arrays: Sequence[Any], dims: Sequence[int | None], **params: Any) -> tuple[list[Any], list[int]]:
    """One launch after the other: what a kernel does with its pointers is not known."""
    moved = [x if dim is None else jax.numpy.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]

    def row(rows: Sequence[Any]) -> list[Any]:
        of_row = iter(rows)
        return launch_p.bind(*(x if d is None else next(of_row) for x, d in zip(arrays, dims, strict=True)), **params)

    results = jax.lax.map(row, [x for x, dim in zip(moved, dims, strict=True) if dim is not None])
    return list(results), [0] * len(results)


def _interpreted(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    launch: Launch,
    types: tuple[ArrayType, ...],
    fresh: tuple[int, ...],
) -> Sequence[Any]:
    """On XLA's own buffers: `jax.pure_callback` would make int32 of int64 while x64 is off, and float32 of float64."""
    given = [i for i in range(len(types)) if i not in fresh]
    writers = [writer(types[i]) for i in launch.written]

    def run(_: Any, *buffers: Any) -> tuple[()]:
        arrays = [buffer.__array__() for buffer in buffers]
        memory = [np.zeros(type_.shape, type_.dtype) for type_ in types]
        for i, array in zip(given, arrays, strict=False):
            memory[i][...] = array
        tensors = [reader(type_)(x) for type_, x in zip(types, memory, strict=True)]
        with torch.no_grad():
            interpret(launch, tensors)
        for i, write, array in zip(launch.written, writers, arrays[len(given) :], strict=True):
            write(array, tensors[i])
        return ()

    return buffer_call(ctx, run, operands, gpu=False)


def _nowhere(*arrays: Any, launch: Launch, **_: Any) -> NoReturn:
    raise LaunchError(
        f"Kernel `{launch.name}` is lowered for a platform on which no Triton kernel runs: they are compiled for GPUs, "
        'and interpreted on a CPU. With backend="callback" the function is called on the CPU beside it.'
    )


def _compiled(
    *arrays: Any, launch: Launch, types: tuple[ArrayType, ...], fresh: tuple[int, ...], platform: str
) -> list[Any]:
    """By jax-triton. It passes inputs, then results: the user's kernel is called from one that takes them so.

    Raises:
        LaunchError: it cannot be compiled for the platform.
    """
    reason = unavailable(platform)
    if reason is not None:
        raise LaunchError(f"Kernel `{launch.name}` cannot be part of a program for {platform}: {reason}.")
    memories = [torch.empty(t.shape, dtype=torch_dtype(t.dtype, "a tensor"), device="meta") for t in types]
    launched = launch.named(memories)
    configurations = launch.configurations(launched)
    given = dict(zip((i for i in range(len(types)) if i not in fresh), arrays, strict=True))
    if 0 in launch.grid_of(configurations[0], launched):  # Triton launches nothing then, and CUDA refuses to
        zeros = {i: jax.numpy.zeros(types[i].shape, types[i].dtype) for i in fresh}
        return [{**zeros, **given}[i] for i in launch.written]
    parameters = Parameters.of(launch, fresh, configurations[0])
    kernel = rewritten(jit_function(launch.kernel), parameters)
    if len(configurations) > 1:
        kernel, options, constants = tuned(kernel, configurations, parameters.numbers), {}, parameters.constants
    else:
        (only,) = configurations
        options = {"num_warps": only.num_warps, "num_stages": only.num_stages, "num_ctas": only.num_ctas}
        constants = {**parameters.constants, **only.constants}
    with LANGUAGE:
        return triton_call(
            kernel,
            [given[x] if isinstance(x, int) else launch.values[x] for x in parameters.inputs],
            out_types=[jax.ShapeDtypeStruct(types[i].shape, types[i].dtype) for i in launch.written],
            grid=lambda meta: launch.grid_of(Configuration(named(meta)), launched),
            constants=spelled(constants),
            aliases=parameters.aliases,
            **options,
        )


batching.primitive_batchers[launch_p] = _batch
mlir.register_lowering(launch_p, _interpreted, platform="cpu")
mlir.register_lowering(launch_p, mlir.lower_fun(_nowhere, multiple_results=True))
for _platform in ("cuda", "rocm"):
    _lower = mlir.lower_fun(functools.partial(_compiled, platform=_platform), multiple_results=True)
    mlir.register_lowering(launch_p, _lower, platform=_platform)
