"""The JAX primitive of a launch: it takes memories, and returns new values of the written memories."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np
import torch
from jax.core import ShapedArray
from jax.interpreters import batching, mlir

from jtbridge._compat import buffer_call
from jtbridge.core.array_types import ArrayType
from jtbridge.core.backend_names import ON_HOST
from jtbridge.core.dtypes import torch_dtype
from jtbridge.core.host_memory import reader, writer
from jtbridge.core.primitive_rules import batch_first, primitive_of_several_results
from jtbridge.errors import LaunchError
from jtbridge.triton._call import triton_call
from jtbridge.triton._interpreter import LANGUAGE_LOCK
from jtbridge.triton._ir import jit_function
from jtbridge.triton._versions import compute_capability, passes_aliases_twice, unsupported_reason

from ._adapter import AdapterSignature, adapter_kernel, autotuned, with_adapter_names, with_kernel_names
from ._interpreter import interpret
from ._launch import Launch, LaunchConfiguration

launch_p = primitive_of_several_results("triton_launch")


def written_values(spec: Launch, arrays: Sequence[Any], fresh: Sequence[int]) -> list[Any]:
    """Return the new values of the memories that a kernel writes.

    Args:
        spec: the launch.
        arrays: the memories of the kernel's tensors.
        fresh: positions of written arrays that have no values before the launch.
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
    """Launch once for each row, because the kernel's pointer arithmetic is not known."""
    arrays, dims = batch_first(arrays, dims)

    def row(rows: Sequence[Any]) -> list[Any]:
        of_row = iter(rows)
        return launch_p.bind(*(x if d is None else next(of_row) for x, d in zip(arrays, dims, strict=True)), **params)

    results = jax.lax.map(row, [x for x, dim in zip(arrays, dims, strict=True) if dim is not None])
    return list(results), [0] * len(results)


def _lower_interpreted(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    launch: Launch,
    types: tuple[ArrayType, ...],
    fresh: tuple[int, ...],
) -> Sequence[Any]:
    """Interpret the kernel on XLA's buffers. `jax.pure_callback` would convert 64-bit types while x64 is off."""
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


def _refuse_platform(*arrays: Any, launch: Launch, **_: Any) -> NoReturn:
    raise LaunchError(
        f"Kernel `{launch.name}` cannot run on this platform. Triton kernels are compiled for GPUs and interpreted on "
        f'CPUs. Use backend="{ON_HOST}" to call the function on the CPU.'
    )


def _lower_compiled(
    *arrays: Any, launch: Launch, types: tuple[ArrayType, ...], fresh: tuple[int, ...], platform: str
) -> list[Any]:
    """Compile the kernel with jax-triton, behind an adapter.

    Raises:
        LaunchError: the kernel cannot be compiled for the platform.
    """
    reason = unsupported_reason(platform)
    reason = reason or (_unsupported_descriptors_reason() if launch.descriptors and platform != "rocm" else None)
    if reason is not None:
        raise LaunchError(f"Kernel `{launch.name}` cannot be part of a program for {platform}: {reason}.")
    memories = [torch.empty(t.shape, dtype=torch_dtype(t.dtype, "a tensor"), device="meta") for t in types]
    arguments = launch.arguments(memories)
    configurations = launch.configurations(arguments)
    given = dict(zip((i for i in range(len(types)) if i not in fresh), arrays, strict=True))
    if 0 in launch.grid_of(configurations[0], arguments):  # Triton skips an empty grid, which is an error for CUDA
        zeros = {i: jax.numpy.zeros(types[i].shape, types[i].dtype) for i in fresh}
        return [{**zeros, **given}[i] for i in launch.written]
    parameters = AdapterSignature.of(launch, fresh, configurations[0])
    kernel = adapter_kernel(jit_function(launch.kernel), parameters)
    if len(configurations) > 1:
        kernel, options, constants = autotuned(kernel, configurations, parameters.numbers), {}, parameters.constants
    else:
        (only,) = configurations
        options, constants = only.options, {**parameters.constants, **only.constants}
    with LANGUAGE_LOCK:
        results = triton_call(
            kernel,
            [given[x] if isinstance(x, int) else launch.values[x] for x in parameters.inputs],
            out_types=[jax.ShapeDtypeStruct(types[i].shape, types[i].dtype) for i in parameters.results],
            grid=lambda meta: launch.grid_of(LaunchConfiguration(with_kernel_names(meta)), arguments),
            constants=with_adapter_names(constants),
            aliases=parameters.aliases,
            **options,
        )
    values = dict(zip(parameters.results, results, strict=True))
    return [values[i] for i in launch.written]


def _unsupported_descriptors_reason() -> str | None:
    """Return why a kernel that makes tensor descriptors cannot be compiled for this process's chip; None if it can.

    From compute capability 9.0 on, Triton writes descriptors to scratch memory whose address is a parameter of the
    kernel, and jax-triton up to 0.3.1 passes a null pointer for it. Seen in the PTX of its kernels.
    """
    if not passes_aliases_twice() or compute_capability() < 90:
        return None
    return (
        "it calls `tl.make_tensor_descriptor`, for which jax-triton 0.3 gives it no memory on a GPU of compute "
        "capability 9.0 or more. Install jax-triton 0.4.1 with Triton 3.7, or use pointers"
    )


batching.primitive_batchers[launch_p] = _batch
mlir.register_lowering(launch_p, _lower_interpreted, platform="cpu")
mlir.register_lowering(launch_p, mlir.lower_fun(_refuse_platform, multiple_results=True))
for _platform in ("cuda", "rocm"):
    _lower = mlir.lower_fun(functools.partial(_lower_compiled, platform=_platform), multiple_results=True)
    mlir.register_lowering(launch_p, _lower, platform=_platform)
