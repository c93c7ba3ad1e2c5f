"""Triton's names of types, and the intermediate representation of a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# Triton's names of torch's dtypes in signatures.
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

# Options with which every kernel is compiled. Triton plans to no longer fuse products and sums by default.
COMPILER_OPTIONS: Mapping[str, Any] = {"enable_fp_fusion": True}

# From the name of each scalar type in a signature to its name in `triton.language`.
LANGUAGE_TYPES = {
    "u1": "int1",
    **{f"{kind}{bits}": f"{kind_}int{bits}" for kind, kind_ in (("i", ""), ("u", "u")) for bits in (8, 16, 32, 64)},
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
}


def scalar_type(parameter: Any, value: Any) -> str:
    """Return the type with which Triton passes a number to a kernel: the annotated type, or one chosen by the value."""
    if parameter.annotation_type:
        return parameter.annotation_type
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64" if value < 1 << 63 else "u64"


def jit_function(kernel: Any) -> Any:
    """Return the result of ``triton.jit`` under the decorators ``triton.autotune`` and ``triton.heuristics``."""
    while hasattr(kernel, "configs") or hasattr(kernel, "values"):
        kernel = kernel.fn
    return kernel


def kernel_ir(function: Any, arguments: Mapping[str, Any]) -> str:
    """Return Triton's intermediate representation of a kernel, calls inlined. It needs no GPU.

    Args:
        function: the result of ``triton.jit``.
        arguments: the kernel's arguments by name, with a dtype in place of each tensor.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    signature, constants = {}, {}
    for parameter in function.params:
        value = arguments[parameter.name]
        if isinstance(value, torch.dtype) and not parameter.is_constexpr:
            signature[parameter.name] = f"*{TRITON_TYPES[value]}"
        elif parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        else:
            signature[parameter.name] = scalar_type(parameter, value)
    source = ASTSource(function, signature, constants)
    target = GPUTarget("cuda", 90, 32)
    backend: Any = make_backend(target)
    options = backend.parse_options({**COMPILER_OPTIONS, **source.parse_options()})
    # The first stage of `triton.compile`, which cannot stop there. The other stages take ten times as long.
    context, stages = ir.context(), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    code_generation = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(stages["ttir"](source.make_ir(target, options, *code_generation, context), {}))
