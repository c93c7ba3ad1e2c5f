"""Calls of Triton kernels from a JAX program, with jax-triton 0.3 or 0.4."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from jtbridge._compat import Primitive
from jtbridge.core.primitive_rules import primitive_of_several_results

from ._assembler import ptx_version
from ._ir import COMPILER_OPTIONS, jit_function
from ._versions import compute_capability, import_jax_triton, passes_aliases_twice


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
    """Return the arrays that a Triton kernel writes, computed in a named scope with the kernel's name.

    Args:
        kernel: the result of ``triton.jit``, or of ``triton.autotune`` applied to it. Its parameters are the operands,
            then a pointer for each result (see :func:`passes_aliases_twice`), then the constants.
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
        call = functools.partial(
            import_jax_triton().triton_call,
            kernel=kernel,
            grid=grid,
            name=name,
            **_result_arguments(operands, out_types, aliases or {}),
            **options,
            **constants,
        )
        if not passes_aliases_twice():
            return call(*operands, backend_options={**COMPILER_OPTIONS, **_ptx_option()})
        return _call_for_assembler(functools.partial(call, **COMPILER_OPTIONS), operands)


def _ptx_option() -> dict[str, int]:
    """Return the option of Triton's compiler for the version of PTX. The compiler for AMD ignores it."""
    try:
        version = ptx_version(compute_capability())
    except RuntimeError:  # jaxlib sees no GPU: the choice of the target is left to jax-triton
        return {}
    return {} if version is None else {"ptx_version": version}


def _call_for_assembler(call: Callable[..., Any], operands: Sequence[Any]) -> list[jax.Array]:
    """Return the results of a call of jax-triton 0.3, which has no argument for the version of PTX.

    The call's primitive is replaced by one whose lowering gives Triton's compiler the version of PTX.
    """
    arrays = [x for x in operands if not isinstance(x, bool | int | float)]

    def of_arrays(*given: Any) -> Any:
        left = iter(given)
        return call(*(x if isinstance(x, bool | int | float) else next(left) for x in operands))

    (equation,) = jax.make_jaxpr(of_arrays)(*arrays).eqns
    return _kernel_call_p().bind(*arrays, **equation.params)


@functools.cache
def _kernel_call_p() -> Primitive:
    """Return a primitive like that of jax-triton 0.3, whose kernels are compiled to PTX that JAX's assembler takes."""
    library = import_jax_triton().triton_lib

    class CudaBackend(library.cb.CUDABackend):
        def parse_options(self, opts: dict[str, Any]) -> Any:
            return super().parse_options({**opts, "ptx_version": ptx_version(self.target.arch)})

    def backend(device: int, capability: int) -> Any:
        return CudaBackend(library.get_cuda_backend(device, capability).target)

    primitive = primitive_of_several_results("triton_kernel_call")
    primitive.def_abstract_eval(library.triton_kernel_call_abstract_eval)
    for platform, of_platform in (("cuda", backend), ("rocm", library.get_hip_backend)):
        lower = functools.partial(library.triton_kernel_call_lowering, of_platform)
        mlir.register_lowering(primitive, lower, platform=platform)
    return primitive


def _result_arguments(
    operands: Sequence[Any], out_types: Sequence[jax.ShapeDtypeStruct], aliases: Mapping[int, int]
) -> dict[str, Any]:
    """Return the arguments that describe results. In jax-triton 0.3, positions in aliases count only arrays."""
    if not passes_aliases_twice():
        return {"out_type": list(out_types), "input_output_aliases": dict(aliases)}
    is_number = [isinstance(x, bool | int | float) for x in operands]
    array_aliases = {position - sum(is_number[:position]): result for position, result in aliases.items()}
    return {"out_shape": list(out_types), "input_output_aliases": array_aliases}
