"""Launches of Triton kernels from JAX: compiled on a GPU, or in Triton's interpreter where that is turned on.

Neither Triton nor jax-triton is imported before a kernel is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jtbridge.core.array_types import ArrayType
from jtbridge.core.host_memory import reader, to_numpy
from jtbridge.triton import LANGUAGE_LOCK, fixed_interpreter, triton_call

Grid = tuple[int, ...]


def interpreting() -> bool:
    """Return whether Triton interprets kernels (``TRITON_INTERPRET=1`` was set when the process started)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def launch(
    kernel: Any,
    *operands: Any,
    out_types: Sequence[jax.ShapeDtypeStruct],
    grid: Grid,
    constants: Mapping[str, Any],
    num_warps: int = 4,
    num_stages: int = 2,
) -> list[jax.Array]:
    """Launch a Triton kernel and return the arrays that it writes.

    Args:
        kernel: a function decorated with ``triton.jit``. Its parameters are the operands, in their order, then a
            pointer for each result, then the constants (``tl.constexpr``).
        operands: arrays, and Python numbers.
        out_types: shape and dtype of each result, which the kernel fills completely.
        grid: the number of programs, in up to three dimensions.
        constants: the kernel's ``tl.constexpr`` parameters by name.
        num_warps: the number of warps per program.
        num_stages: the number of stages in which loops are pipelined.
    """
    if interpreting():
        return _interpreted(kernel, operands, out_types, grid, constants)
    with LANGUAGE_LOCK:
        return triton_call(
            kernel,
            operands,
            out_types=out_types,
            grid=grid,
            constants=constants,
            num_warps=num_warps,
            num_stages=num_stages,
        )


def _interpreted(
    kernel: Any,
    operands: Sequence[Any],
    out_types: Sequence[jax.ShapeDtypeStruct],
    grid: Grid,
    constants: Mapping[str, Any],
) -> list[jax.Array]:
    arrays = [x for x in operands if isinstance(x, jax.Array | np.ndarray)]

    def run(*values: Any) -> list[np.ndarray]:
        import torch

        tensors = iter([_as_torch_tensor(np.array(value)) for value in values])
        given = [next(tensors) if isinstance(x, jax.Array | np.ndarray) else x for x in operands]
        # Results begin as NaN, or as ones for other dtypes, so that tests find elements that the kernel does not write.
        results = [_as_torch_tensor(_unset(type_)) for type_ in out_types]
        with torch.no_grad(), fixed_interpreter():
            kernel[grid](*given, *results, **constants)
        return [to_numpy(result) for result in results]

    return list(jax.pure_callback(run, list(out_types), *arrays, vmap_method="sequential"))


def _as_torch_tensor(memory: np.ndarray) -> Any:
    return reader(ArrayType(memory.shape, memory.dtype))(memory)


def _unset(type_: jax.ShapeDtypeStruct) -> np.ndarray:
    floating = jax.numpy.issubdtype(type_.dtype, np.floating)
    return np.full(type_.shape, np.nan if floating else 1, type_.dtype)
