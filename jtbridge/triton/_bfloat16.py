"""bfloat16 and float8 numbers in Triton's interpreter, rounded as a GPU rounds them.

The interpreter holds a bfloat16 number as an integer of its 16 bits. The patches hold it as `ml_dtypes.bfloat16`, a
dtype that NumPy can compute with. Tried on triton 3.6 to 3.9.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOATS = {
    "float8e5": ml_dtypes.float8_e5m2,
    "float8e4nv": ml_dtypes.float8_e4m3fn,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
}


def bfloat16_patches() -> list[tuple[Any, str, Any]]:
    """Return the patches: the object to change, the attribute's name and its new value."""
    from triton.runtime import interpreter

    patches: list[tuple[Any, str, Any]] = [(interpreter, name, make(interpreter)) for name, make in _FUNCTIONS.items()]
    patches += [(interpreter.InterpreterBuilder, name, make(interpreter)) for name, make in _OPERATORS.items()]
    patches.append((interpreter.InterpreterBuilder, "get_bf16", _bfloat16_constant(interpreter)))
    patches.append((interpreter.ReduceOps, "sum", _reduce_sum))
    patches.append((interpreter.ScanOps, "cumsum", _cumulative_sum))
    return patches


def _dtype(interpreter: Any) -> Any:
    dtype_of, tl = interpreter._get_np_dtype, interpreter.tl
    return lambda type_: _BFLOAT16 if getattr(type_, "scalar", type_) == tl.bfloat16 else dtype_of(type_)


def _bfloat16_constant(interpreter: Any) -> Any:
    handle, bfloat16 = interpreter.TensorHandle, interpreter.tl.bfloat16
    return lambda self, value: handle(np.array([value], _BFLOAT16), bfloat16)


def _float_conversion(interpreter: Any) -> Any:
    """Return a conversion from or to bfloat16 and the 8-bit floating-point types.

    The interpreter's own function converts 127 to 64: if the mantissa rounds up to the next power of two, the function
    does not increase the exponent.
    """
    original, tl = interpreter._convert_float, interpreter.tl
    types = {getattr(tl, name): np.dtype(dtype) for name, dtype in _FLOATS.items()}

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        truncates = rounding == interpreter._ir.ROUNDING_MODE.RTZ
        if source not in types or target not in types or (truncates and target != tl.bfloat16):
            return values if source == target else original(values, source, target, rounding)
        numbers = values.view(types[source])
        if truncates:
            return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(_BFLOAT16)
        if types[target].itemsize == 1:  # saturates, as on NVIDIA GPUs
            wide = numbers.astype(np.float32)
            most = float(ml_dtypes.finfo(types[target]).max)
            return wide.clip(-most, most).astype(types[target]).view(np.uint8)
        return numbers.astype(types[target])

    return convert


def _masked_load(interpreter: Any) -> Any:
    original, tl, handle = interpreter.InterpreterBuilder.create_masked_load, interpreter.tl, interpreter.TensorHandle

    def load(self: Any, pointers: Any, mask: Any, other: Any, *how: Any, **named: Any) -> Any:
        if pointers.get_element_ty() != tl.bfloat16:
            return original(self, pointers, mask, other, *how, **named)
        if other is not None:
            other = handle(other.data.view(np.uint16), tl.uint16)
        bits = original(self, handle(pointers.data, tl.pointer_type(tl.uint16)), mask, other, *how, **named)
        return handle(bits.data.view(_BFLOAT16), tl.bfloat16)

    return load


def _masked_store(interpreter: Any) -> Any:
    original, tl, handle = interpreter.InterpreterBuilder.create_masked_store, interpreter.tl, interpreter.TensorHandle

    def store(self: Any, pointers: Any, value: Any, *how: Any, **named: Any) -> Any:
        if value.data.dtype == _BFLOAT16:
            value = handle(value.data.view(np.uint16), tl.uint16)
        return original(self, pointers, value, *how, **named)

    return store


def _atomic(interpreter: Any) -> Any:
    """Return the addition to bfloat16 memory, the only atomic operation of Triton on bfloat16.

    The result needs no lock, because interpreted programs run one after another.
    """
    original, tl, handle = interpreter.InterpreterBuilder.create_atomic_rmw, interpreter.tl, interpreter.TensorHandle
    memory = interpreter._interpreter

    def change(self: Any, kind: Any, pointers: Any, value: Any, mask: Any, *how: Any) -> Any:
        if value.data.dtype != _BFLOAT16:
            return original(self, kind, pointers, value, mask, *how)
        before = np.zeros_like(value.data)
        for i in zip(*np.nonzero(mask.data), strict=True):
            pointer, one = np.array([pointers.data[i]]), np.ones(1, bool)
            before[i] = memory.load(pointer, one, np.zeros(1, np.uint16), np.dtype(np.uint16)).view(_BFLOAT16)[0]
            memory.store(pointer, np.array([before[i] + value.data[i]]).view(np.uint16), one)
        return handle(before, tl.bfloat16)

    return change


def _dot(interpreter: Any) -> Any:
    original, tl = interpreter.InterpreterBuilder.create_dot, interpreter.tl

    def product(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.data.dtype == _BFLOAT16 else x for x in (a, b))
        return original(self, a, b, *others)

    return product


# NumPy rounds every partial sum of bfloat16 numbers, so sums are computed in float32.


def _reduce_sum(self: Any, x: Any) -> Any:
    return self.to_tensor(np.sum(_float32_data(x), axis=self.axis, keepdims=self.keep_dims), x.dtype)


def _cumulative_sum(self: Any, x: Any) -> Any:
    return [self.to_tensor(np.cumsum(_float32_data(x), axis=self.axis), dtype=x.dtype)]


def _float32_data(x: Any) -> np.ndarray:
    data = x.handle.data
    return data.astype(np.float32) if data.dtype == _BFLOAT16 else data


_FUNCTIONS = {"_get_np_dtype": _dtype, "_convert_float": _float_conversion}
_OPERATORS = {
    "create_masked_load": _masked_load,
    "create_masked_store": _masked_store,
    "create_atomic_rmw": _atomic,
    "create_dot": _dot,
}
