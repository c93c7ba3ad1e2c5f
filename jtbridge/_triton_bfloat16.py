"""bfloat16 in Triton's interpreter as numbers that NumPy computes with, rounded as a GPU rounds them; float8 too.

The interpreter's own are integers of 16 bits. Triton's own insides are used; tried on triton 3.6 to 3.9.
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


def bfloat16_of_numpy() -> list[tuple[Any, str, Any]]:
    """What to put into the interpreter: where, under which name, and what."""
    from triton.runtime import interpreter

    changes: list[tuple[Any, str, Any]] = [(interpreter, name, make(interpreter)) for name, make in _FUNCTIONS.items()]
    changes += [(interpreter.InterpreterBuilder, name, make(interpreter)) for name, make in _OPERATORS.items()]
    changes.append((interpreter.InterpreterBuilder, "get_bf16", _constant(interpreter)))
    changes.append((interpreter.ReduceOps, "sum", _sum(interpreter)))
    changes.append((interpreter.ScanOps, "cumsum", _cumulative_sum(interpreter)))
    return changes


def _dtype(interpreter: Any) -> Any:
    dtype_of, tl = interpreter._get_np_dtype, interpreter.tl
    return lambda type_: _BFLOAT16 if getattr(type_, "scalar", type_) == tl.bfloat16 else dtype_of(type_)


def _constant(interpreter: Any) -> Any:
    handle, bfloat16 = interpreter.TensorHandle, interpreter.tl.bfloat16
    return lambda self, value: handle(np.array([value], _BFLOAT16), bfloat16)


def _convert(interpreter: Any) -> Any:
    """Between floats, one of them of 8 bits or bfloat16.

    The interpreter's own makes 64 of 127: a mantissa that is rounded up to the next power leaves the exponent alone.
    """
    theirs, tl = interpreter._convert_float, interpreter.tl
    types = {getattr(tl, name): np.dtype(dtype) for name, dtype in _FLOATS.items()}

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        cut = rounding == interpreter._ir.ROUNDING_MODE.RTZ
        if source not in types or target not in types or (cut and target != tl.bfloat16):
            return values if source == target else theirs(values, source, target, rounding)
        numbers = values.view(types[source])
        if cut:
            return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(_BFLOAT16)
        if types[target].itemsize == 1:  # as NVIDIA's, which give the largest number instead of none or infinity
            wide = numbers.astype(np.float32)
            most = float(ml_dtypes.finfo(types[target]).max)
            return wide.clip(-most, most).astype(types[target]).view(np.uint8)
        return numbers.astype(types[target])

    return convert


def _load(interpreter: Any) -> Any:
    theirs, tl, handle = interpreter.InterpreterBuilder.create_masked_load, interpreter.tl, interpreter.TensorHandle

    def load(self: Any, pointers: Any, mask: Any, other: Any, *how: Any, **named: Any) -> Any:
        if pointers.get_element_ty() != tl.bfloat16:
            return theirs(self, pointers, mask, other, *how, **named)
        if other is not None:
            other = handle(other.data.view(np.uint16), tl.uint16)
        bits = theirs(self, handle(pointers.data, tl.pointer_type(tl.uint16)), mask, other, *how, **named)
        return handle(bits.data.view(_BFLOAT16), tl.bfloat16)

    return load


def _store(interpreter: Any) -> Any:
    theirs, tl, handle = interpreter.InterpreterBuilder.create_masked_store, interpreter.tl, interpreter.TensorHandle

    def store(self: Any, pointers: Any, value: Any, *how: Any, **named: Any) -> Any:
        if value.data.dtype == _BFLOAT16:
            value = handle(value.data.view(np.uint16), tl.uint16)
        return theirs(self, pointers, value, *how, **named)

    return store


def _atomic(interpreter: Any) -> Any:
    """Of bfloat16 there is only addition. Programs run one after the other."""
    theirs, tl, handle = interpreter.InterpreterBuilder.create_atomic_rmw, interpreter.tl, interpreter.TensorHandle
    memory = interpreter._interpreter

    def change(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *how: Any) -> Any:
        if value.data.dtype != _BFLOAT16:
            return theirs(self, operation, pointers, value, mask, *how)
        before = np.zeros_like(value.data)
        for i in zip(*np.nonzero(mask.data), strict=True):
            pointer, one = np.array([pointers.data[i]]), np.ones(1, bool)
            before[i] = memory.load(pointer, one, np.zeros(1, np.uint16), np.dtype(np.uint16)).view(_BFLOAT16)[0]
            memory.store(pointer, np.array([before[i] + value.data[i]]).view(np.uint16), one)
        return handle(before, tl.bfloat16)

    return change


def _product(interpreter: Any) -> Any:
    theirs, tl = interpreter.InterpreterBuilder.create_dot, interpreter.tl

    def product(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.data.dtype == _BFLOAT16 else x for x in (a, b))
        return theirs(self, a, b, *others)

    return product


# NumPy would round each partial sum, and add one number after the other.


def _sum(interpreter: Any) -> Any:
    del interpreter

    def total(self: Any, x: Any) -> Any:
        return self.to_tensor(np.sum(_wide(x), axis=self.axis, keepdims=self.keep_dims), x.dtype)

    return total


def _cumulative_sum(interpreter: Any) -> Any:
    del interpreter

    def total(self: Any, x: Any) -> Any:
        return [self.to_tensor(np.cumsum(_wide(x), axis=self.axis), dtype=x.dtype)]

    return total


def _wide(x: Any) -> np.ndarray:
    data = x.handle.data
    return data.astype(np.float32) if data.dtype == _BFLOAT16 else data


_FUNCTIONS = {"_get_np_dtype": _dtype, "_convert_float": _convert}
_OPERATORS = {
    "create_masked_load": _load,
    "create_masked_store": _store,
    "create_atomic_rmw": _atomic,
    "create_dot": _product,
}
