"""Keys that distinguish static values by type and value: 1, 1.0 and True differ, and so do 0.0 and -0.0."""

from __future__ import annotations

import enum
import struct
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

from .definitions import slot_names


def static_key(value: Any) -> Any:
    """Return a hashable key; two values that may behave differently have different keys.

    The key contains the parts of containers, dataclasses and other objects whose class defines ``__eq__``, because
    Python's ``==`` says that ``Config(1)`` and ``Config(True)`` are equal. An object without ``__eq__`` equals only
    itself.

    Raises:
        TypeError: `value` is not hashable.
    """
    if not isinstance(value, slice):  # Python 3.11 cannot hash a slice
        hash(value)
    return _key_of_parts(value, ())


def value_key(value: Any) -> Any:
    """Return the key of a value that need not be hashable; the key need not be hashable either."""
    return _key_of_parts(value, ())


def same_static(a: Any, b: Any) -> bool:
    """Return whether two static values are interchangeable. A NaN is the same as a NaN of the same bits."""
    if a is b:
        return True
    return type(a) is type(b) and value_key(a) == value_key(b)


def _key_of_parts(value: Any, inside: tuple[int, ...]) -> Any:
    kind = type(value)
    if kind in _PLAIN or isinstance(value, _BY_EQUALITY):
        return kind, value
    if isinstance(value, range):  # equal ranges may differ in parts: range(0, 3, 2) and range(0, 4, 2)
        return kind, value.start, value.stop, value.step
    if isinstance(value, float):
        return kind, struct.pack("d", value)
    if isinstance(value, complex):
        return kind, struct.pack("dd", value.real, value.imag)
    if isinstance(value, np.ndarray | np.generic):
        return kind, value.shape, value.dtype.str, value.tobytes() if value.dtype != object else id(value)
    if id(value) in inside:
        return kind, "the same object again"
    inside = (*inside, id(value))
    if isinstance(value, Mapping):
        return kind, tuple((_key_of_parts(k, inside), _key_of_parts(v, inside)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return kind, tuple(_key_of_parts(item, inside) for item in value), _attributes(value, inside)
    if isinstance(value, set | frozenset):
        return kind, frozenset(_key_of_parts(item, inside) for item in value)
    if isinstance(value, slice):
        return kind, tuple(_key_of_parts(part, inside) for part in (value.start, value.stop, value.step))
    if isinstance(value, torch.Tensor | jax.Array) or kind.__eq__ is object.__eq__:
        return kind, _Identity(value)
    if kind.__module__ == "decimal":  # the decimals 1.0 and 1 are equal, and print differently
        return kind, str(value)
    return kind, _Equality(value), _attributes(value, inside)


_PLAIN = (int, bool, str, bytes, type(None), type(...))
_BY_EQUALITY = (type, enum.Enum, types.FunctionType, types.MethodType, types.BuiltinFunctionType, torch.dtype)


class _Identity:
    """Key of an object that equals only keys of the same object, and keeps the object alive."""

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class _Equality:
    """Key that compares objects by their own ``==``. The key of an object without a hash has its class's hash."""

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Equality) and bool(self._value == other._value)

    def __hash__(self) -> int:
        kind = type(self._value)
        return hash(kind) if kind.__hash__ is None else hash(self._value)


def _attributes(value: Any, inside: tuple[int, ...]) -> Any:
    names = [*getattr(value, "__dict__", {}), *slot_names(type(value).__mro__)]
    return tuple((name, _key_of_parts(getattr(value, name), inside)) for name in names if hasattr(value, name))
