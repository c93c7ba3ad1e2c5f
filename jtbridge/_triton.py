"""Triton and jax-triton, where they are installed: neither is imported before it is used.

Triton's own insides are used here, in `_triton_interpreter.py`, `_triton_bfloat16.py` and `launches/_interpreter.py`.
Tried on triton 3.6, 3.7 and 3.9 with jax-triton 0.3.1, and on 3.7 to 3.9 with 0.4.1.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch


@functools.cache
def unavailable(platform: str = "cuda") -> str | None:
    """Why no Triton kernel can be used for a platform, "rocm" or one of NVIDIA's; None if it can."""
    for module, package in (("triton", "triton"), ("jax_triton", "jax-triton")):
        if importlib.util.find_spec(module) is None:
            return f"`{package}` is not installed"
    try:
        _jax_triton()
    except Exception as error:  # noqa: BLE001  (a broken installation costs nothing but the backend)
        lines = str(error).strip().splitlines()
        return f"jax-triton cannot be imported: {type(error).__name__}: {lines[0] if lines else ''}"
    return _mismatch() or (_mismatch_on_amd() if platform == "rocm" else None)


def _mismatch() -> str | None:
    """Why the two do not go together; None if they do. With an older Triton jax-triton 0.4 finds no NVIDIA in it."""
    triton, jax_triton = _versions()
    if not names_aliases_twice() and _numbers(triton) < (3, 7):
        return (
            f"jax-triton {jax_triton} needs Triton 3.7 or newer, and {triton} is installed: jax-triton 0.3.1 takes it"
        )
    return None


def _mismatch_on_amd() -> str | None:
    """Why not for AMD: Triton 3.7 reads there how many blocks a cluster has, and jax-triton up to 0.4.1 does not say.

    Tried by lowering for it with both, Triton 3.6 to 3.9, on a machine without a GPU.
    """
    triton, jax_triton = _versions()
    says = "num_ctas" in _jax_triton().triton_lib.compile_ttir_to_hsaco_inplace.__code__.co_consts
    if says or _numbers(triton) < (3, 7):
        return None
    return f"jax-triton {jax_triton} cannot compile for AMD with Triton {triton}: Triton 3.6 with jax-triton 0.3.1 can"


def _versions() -> tuple[str, str]:
    return importlib.metadata.version("triton"), importlib.metadata.version("jax-triton")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


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
    """What a Triton kernel writes, as ``jax_triton.triton_call`` has it, under a scope of the kernel's name.

    Args:
        kernel: what ``triton.jit`` made, or ``triton.autotune`` over it. Its parameters are the operands, then a
            pointer for each result (see :func:`names_aliases_twice`), then the constants.
        operands: arrays and Python numbers.
        out_types: shape and dtype of each result.
        grid: how many programs run, or a function of the constants that gives it.
        constants: the kernel's ``tl.constexpr`` parameters by name.
        aliases: positions of operands, and of the results that start as them.
        options: warps, stages and blocks of a cluster.
    """
    name = jit_function(kernel).__name__
    with jax.named_scope(name), warnings.catch_warnings():
        # For aliases 0.4 would have `jax.Ref`s, which what is traced while a program is lowered cannot make.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        return _jax_triton().triton_call(
            *operands,
            kernel=kernel,
            grid=grid,
            name=name,
            **_results(operands, out_types, aliases or {}),
            **_fused(),
            **options,
            **constants,
        )


def _results(
    operands: Sequence[Any], out_types: Sequence[jax.ShapeDtypeStruct], aliases: Mapping[int, int]
) -> dict[str, Any]:
    """The arguments that tell of results: jax-triton 0.3 counts the operands that are arrays alone, 0.4 all of them."""
    if not names_aliases_twice():
        return {"out_type": list(out_types), "input_output_aliases": dict(aliases)}
    numbers = [isinstance(x, bool | int | float) for x in operands]
    of_arrays = {position - sum(numbers[:position]): result for position, result in aliases.items()}
    return {"out_shape": list(out_types), "input_output_aliases": of_arrays}


def _fused() -> dict[str, Any]:
    """Products that are added to are fused: Triton's default up to 3.9, which says there that it will be another."""
    fused = {"enable_fp_fusion": True}
    return fused if names_aliases_twice() else {"backend_options": fused}


@functools.cache
def names_aliases_twice() -> bool:
    """Whether a kernel has two parameters for an operand that a result starts as: up to jax-triton 0.3 it has."""
    return "out_type" not in inspect.signature(_jax_triton().triton_call).parameters


# What Triton calls torch's types.
TRITON_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.bool: "i1",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
}


# What Triton's language calls the types of numbers.
LANGUAGE_TYPES = {
    "u1": "int1",
    **{f"{kind}{bits}": f"{kind_}int{bits}" for kind, kind_ in (("i", ""), ("u", "u")) for bits in (8, 16, 32, 64)},
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
}


def number_type(parameter: Any, value: Any) -> str:
    """The type as which Triton passes a number to a kernel: what the parameter says, or by what is passed."""
    if parameter.annotation_type:
        return parameter.annotation_type
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64" if value < 1 << 63 else "u64"


def analysed_code(function: Any, named: Mapping[str, Any]) -> str:
    """Triton's intermediate code of a kernel for arguments (of a tensor its dtype), calls inlined. It needs no GPU."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    signature, constants = {}, {}
    for parameter in function.params:
        value = named[parameter.name]
        if isinstance(value, torch.dtype) and not parameter.is_constexpr:
            signature[parameter.name] = f"*{TRITON_TYPES[value]}"
        elif parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        else:
            signature[parameter.name] = number_type(parameter, value)
    source = ASTSource(function, signature, constants)
    target = GPUTarget("cuda", 90, 32)
    backend: Any = make_backend(target)
    options = backend.parse_options({"enable_fp_fusion": True, **source.parse_options()})
    # The first stage of `triton.compile`, which has no way to stop there. The others take ten times as long.
    context, stages = ir.context(), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    made = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(stages["ttir"](source.make_ir(target, options, *made, context), {}))


def _jax_triton() -> Any:
    """The module, whose import sets ``TRITON_CACHE_DIR`` to nothing (0.3.1 does)."""
    before = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton
    finally:
        os.environ.pop("TRITON_CACHE_DIR", None)
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before
    return jax_triton


def jit_function(kernel: Any) -> Any:
    """What ``triton.jit`` made, under the decorators of tuning over it."""
    while hasattr(kernel, "configs") or hasattr(kernel, "values"):
        kernel = kernel.fn
    return kernel
