"""Calls of Triton kernels from a JAX program, with jax-triton 0.3 or 0.4."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ._ir import COMPILER_OPTIONS, jit_function
from ._versions import import_jax_triton, passes_aliases_twice


def triton_call(
    kernel: Any,
    operands: Sequence[Any],
    *,
    out_types: Sequence[jax.ShapeDtypeStruct],
    grid: Any,
    constants: Mapping[str, Any],
    aliases: Mapping[int, int] | None = None,
    **options: int,
) -> list[jax.Array]:
    """Return the arrays that a Triton kernel writes, computed in a named scope of the kernel's name.

    Args:
        kernel: the result of ``triton.jit``, or of ``triton.autotune`` over it. Its parameters are the operands, then
            a pointer for each result (see :func:`passes_aliases_twice`), then the constants.
        operands: arrays and Python numbers.
        out_types: shape and dtype of each result.
        grid: the number of programs in each dimension, or a function of the constants that returns it.
        constants: the kernel's ``tl.constexpr`` parameters by name.
        aliases: positions of operands, and the positions of the results that share their memory.
        options: `num_warps`, `num_stages` and `num_ctas`.
    """
    name = jit_function(kernel).__name__
    with jax.named_scope(name), warnings.catch_warnings():
        # jax-triton 0.4 asks for `jax.Ref`s instead, which cannot be made while a program is lowered.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        return import_jax_triton().triton_call(
            *operands,
            kernel=kernel,
            grid=grid,
            name=name,
            **_result_arguments(operands, out_types, aliases or {}),
            **(COMPILER_OPTIONS if passes_aliases_twice() else {"backend_options": COMPILER_OPTIONS}),
            **options,
            **constants,
        )


def _result_arguments(
    operands: Sequence[Any], out_types: Sequence[jax.ShapeDtypeStruct], aliases: Mapping[int, int]
) -> dict[str, Any]:
    """Return the arguments that describe results. jax-triton 0.3 counts arrays alone in aliases."""
    if not passes_aliases_twice():
        return {"out_type": list(out_types), "input_output_aliases": dict(aliases)}
    is_number = [isinstance(x, bool | int | float) for x in operands]
    array_aliases = {position - sum(is_number[:position]): result for position, result in aliases.items()}
    return {"out_shape": list(out_types), "input_output_aliases": array_aliases}
