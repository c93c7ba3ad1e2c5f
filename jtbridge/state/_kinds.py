"""The kinds of mutable objects: how each is read, written and compared."""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import ctypes
import functools
import operator
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from jtbridge._compat import RNN_WEIGHTS, forward_pre_hooks, hooks_of_leaf, set_hooks_of_leaf
from jtbridge.core.closures import read_cell
from jtbridge.core.definitions import module_of, slot_names

from ._comparison import MISSING, same, same_tensors

_LIBRARIES = sys.stdlib_module_names | {
    *("torch", "torchgen", "functorch", "triton", "jax", "jaxlib", "numpy", "scipy", "sympy", "jtbridge"),
    *("typing_extensions", "ml_dtypes", "pytest", "_pytest", "pluggy", "hypothesis"),
    "tqdm",  # its monitor, a thread, writes the time to itself
    "filelock",  # it counts its locks, of which torch makes some when it is first imported whole
}
_MAKING_CLASSES = ("types", "torch.nn.utils.parametrize")  # modules with functions that make classes for users
# The methods that return the tensors of a sparse tensor.
_METHODS_OF_LAYOUTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
METHODS = (
    *(types.FunctionType, staticmethod, classmethod, property, functools.cached_property),
    *(functools.partialmethod, functools.singledispatchmethod),
)

# Torch's old hooks that compute a weight from others before each call, and assign it to the module.
_DERIVING_HOOKS = (WeightNorm, SpectralNorm)
GLOBAL_RANDOM = random.random.__self__  # type: ignore[attr-defined]
GLOBAL_NUMPY_RANDOM = np.random.rand.__self__  # type: ignore[attr-defined]


class Kind(NamedTuple):
    """Functions that read, write and compare one kind of mutable object."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    compare: Callable[[Any, Any], Iterator[tuple[str, Any, Any, Any]]]  # yields step, key, before, after
    # A fast test whether an object certainly still has the saved contents, as nearly all objects do.
    is_unchanged: Callable[[Any, Any], bool] = lambda obj, contents: False


def is_of_library(cls: type) -> bool:
    """Return whether a class belongs to a library that holds no state of users.

    A class that `dataclasses.make_dataclass` or `types.new_class` makes may name `types` as its module, and a class
    that torch makes for a parametrized module names torch.
    """
    name = module_of(cls)
    if name in _MAKING_CLASSES and not hasattr(sys.modules.get(name), cls.__name__):
        return False
    return of_library(name)


@functools.lru_cache(maxsize=1024)
def of_library(module: str) -> bool:
    """Return whether a module belongs to the standard library, or to a library that holds no state of users."""
    name = module.partition(".")[0]
    return name in _LIBRARIES and not (name in sys.stdlib_module_names and _is_elsewhere(name))


def _is_elsewhere(name: str) -> bool:
    """Return whether a module with the name of a standard library module is another module, such as the user's."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:  # it is built in, or not imported
        return False
    path, folders = Path(file), [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    return not any(map(path.is_relative_to, folders)) or "site-packages" in path.parts


def attributes_of(obj: Any) -> dict[str, Any] | None:
    """Return the `__dict__` of an object without a call of its `__getattribute__`; None if it has no `__dict__`."""
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except (AttributeError, TypeError):  # TypeError: a class
        attributes = getattr(obj, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def slots(cls: type) -> list[str]:
    """Return the names in the `__slots__` of a class and of its bases that no library defines."""
    return slot_names(base for base in cls.__mro__ if not of_library(module_of(base)))


def _compare_items(step: str) -> Callable[[dict, dict], Iterator[tuple[str, Any, Any, Any]]]:
    def compare(before: dict, after: dict) -> Iterator[tuple[str, Any, Any, Any]]:
        if len(before) == len(after) and all(
            k is m and v is w for (k, v), (m, w) in zip(before.items(), after.items(), strict=True)
        ):
            return
        is_different = False
        for key in [*before, *(key for key in after if key not in before)]:
            was, now = before.get(key, MISSING), after.get(key, MISSING)
            if not same(was, now):
                is_different = True
                yield step, key, was, now
        if step == "item" and not is_different and [*before] != [*after]:  # only the order differs
            yield "", None, before, after

    return compare


def _has_items(obj: dict, contents: dict) -> bool:
    """Return whether a dict has the same objects as another one, in the same order."""
    return (
        dict.__len__(obj) == len(contents)  # a subclass may compute its length
        and all(map(operator.is_, dict.values(obj), dict.values(contents)))
        and all(map(operator.is_, dict.keys(obj), dict.keys(contents)))
    )


def _has_elements(obj: Sequence[Any], contents: Sequence[Any]) -> bool:
    return len(obj) == len(contents) and all(map(operator.is_, obj, contents))


def _compare_sequence(before: Sequence[Any], after: Sequence[Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    if len(before) != len(after):
        yield "", None, before, after
        return
    for i, (was, now) in enumerate(zip(before, after, strict=True)):
        if was is not now and not same(was, now):
            yield "item", i, was, now


def _compare_value(before: Any, after: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    if not same(before, after):
        yield "", None, before, after


def _compare_tensors(before: tuple, after: tuple) -> Iterator[tuple[str, Any, Any, Any]]:
    for name, was, now in zip(("grad", "requires_grad", "data"), before, after, strict=False):
        if name == "data":
            changed = _memory_layout(was) != _memory_layout(now)
        else:
            changed = not same(was, now)
        if changed:
            yield "attribute", name, was, now
    if len(before) > 3:
        values, memory = before[3], after[2]
        has_values = _memory_bytes(memory) == values if isinstance(values, bytes) else same(values, memory)
        if not has_values:
            yield "", None, values, memory


def _compare_identity(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    for key, was in before.items():
        if was is not after[key]:
            yield "attribute", key, was, after[key]


def _compare_sets(before: set, after: set) -> Iterator[tuple[str, Any, Any, Any]]:
    if len(before) != len(after) or before != after:
        yield "", None, before, after


def kind_of_dict(obj: dict) -> Kind:
    return _ORDERED if isinstance(obj, collections.OrderedDict) else _DICT


def _write_dict(base: type) -> Callable[[dict, dict], None]:
    def write(obj: dict, contents: dict) -> None:
        base.clear(obj)  # type: ignore[attr-defined]
        for key, value in contents.items():
            base.__setitem__(obj, key, value)  # type: ignore[attr-defined]

    return write


def _write_deque(obj: collections.deque, contents: list[Any]) -> None:
    obj.clear()
    obj.extend(contents)


def _write_set(obj: set, contents: set) -> None:
    set.clear(obj)
    set.update(obj, contents)


def has_memory(obj: Any) -> bool:
    """Return whether an object exposes memory that may be written to, such as an array of `array` or `ctypes`."""
    try:
        with memoryview(obj) as memory:
            return not memory.readonly and memory.c_contiguous
    except (TypeError, ValueError, BufferError):  # it exposes no memory, or has released it
        return False


def _read_memory(obj: Any) -> bytes:
    with memoryview(obj) as memory:
        return memory.tobytes()


def _write_memory(obj: Any, contents: bytes) -> None:
    if isinstance(obj, bytearray):
        obj[:] = contents  # also if its length has changed
    elif isinstance(obj, array.array):
        obj[:] = array.array(obj.typecode, contents)
    else:
        with memoryview(obj) as memory, memory.cast("B") as elements:
            elements[:] = contents


def _write_array(obj: np.ndarray, contents: np.ndarray) -> None:
    if obj.shape != contents.shape:  # `resize` in place
        obj.resize(contents.shape, refcheck=False)
    obj[...] = contents


def _write_cell(cell: types.CellType, contents: Any) -> None:
    if contents is MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = contents


def _read_globals(obj: tuple[dict[str, Any], set[str]]) -> dict[str, Any]:
    scope, names = obj
    return {name: scope[name] for name in names if name in scope}


def _write_globals(obj: tuple[dict[str, Any], set[str]], contents: dict[str, Any]) -> None:
    scope, names = obj
    for name in names:
        if name in contents:
            scope[name] = contents[name]
        else:
            scope.pop(name, None)


def _read_class(cls: type) -> dict[str, Any]:
    attributes = {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith(("__", "_abc_")) or isinstance(value, METHODS)
    }
    return {"__bases__": cls.__bases__, **attributes}


def _write_class(cls: type, contents: dict[str, Any]) -> None:
    now = _read_class(cls)
    for name in now.keys() - contents.keys():
        delattr(cls, name)
    for name, value in contents.items():
        if now.get(name, MISSING) is not value:
            setattr(cls, name, value)


def _read_function(fn: types.FunctionType) -> dict[str, Any]:
    return {name: getattr(fn, name) for name in ("__code__", "__defaults__", "__kwdefaults__")}


def _write_function(fn: types.FunctionType, contents: dict[str, Any]) -> None:
    for name, value in contents.items():
        if getattr(fn, name) is not value:
            setattr(fn, name, value)


def _has_code(fn: types.FunctionType, contents: dict[str, Any]) -> bool:
    return all(getattr(fn, name) is value for name, value in contents.items())


def _read_partial(partial: functools.partial) -> dict[str, Any]:
    return {"func": partial.func, "args": partial.args, "keywords": dict(partial.keywords)}


def _write_partial(partial: functools.partial, contents: dict[str, Any]) -> None:
    partial.__setstate__((contents["func"], contents["args"], contents["keywords"], vars(partial)))  # type: ignore[attr-defined]


def _read_slots(obj: Any) -> dict[str, Any]:
    return {name: getattr(obj, name) for name in slots(type(obj)) if hasattr(obj, name)}


def _write_slots(obj: Any, contents: dict[str, Any]) -> None:
    for name in slots(type(obj)):
        if name in contents:
            object.__setattr__(obj, name, contents[name])
        elif hasattr(obj, name):
            object.__delattr__(obj, name)


def _read_tensor(tensor: torch.Tensor) -> tuple:
    return (tensor.grad if tensor.is_leaf else None), tensor.requires_grad, tensor.detach()


def parts_of_tensor(tensor: torch.Tensor) -> list[tuple[str, Any]]:
    """Return the tensors of which a sparse tensor or a subclass of tensors consists, each with its name."""
    if tensor.layout in _METHODS_OF_LAYOUTS:
        return [(f"{name}()", getattr(tensor.detach(), name)()) for name in _METHODS_OF_LAYOUTS[tensor.layout]]
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()  # type: ignore[attr-defined]
    return [(name, getattr(tensor, name)) for name in names]


def _memory_bytes(tensor: torch.Tensor) -> bytes:
    """Return the memory of a contiguous tensor on the CPU, of any dtype, in a tenth of the time of a clone."""
    size = tensor.nbytes
    fits = size and _end_of(tensor) <= tensor.untyped_storage().nbytes()  # a storage may have shrunk
    return ctypes.string_at(tensor.data_ptr(), size) if fits else b""


def _end_of(tensor: torch.Tensor) -> int:
    """Return the byte offset in its storage at which a contiguous tensor ends."""
    return int(tensor.storage_offset()) * tensor.itemsize + tensor.nbytes


def _has_bytes(tensor: torch.Tensor, contents: tuple) -> bool:
    *others, values = contents
    return _has_memory(tensor, others) and _memory_bytes(tensor) == values


def _has_memory(tensor: torch.Tensor, contents: Sequence[Any]) -> bool:
    grad, requires_grad, memory = contents
    return (
        tensor.requires_grad is requires_grad
        and (not tensor.is_leaf or tensor.grad is grad)
        and _memory_layout(tensor) == _memory_layout(memory)
    )


def _memory_layout(tensor: torch.Tensor) -> Any:
    if tensor.is_nested:  # it has no sizes
        return tensor.dtype
    # A parameter of a lazy module has no `shape`.
    place = (tensor.data_ptr(), tensor.stride()) if tensor.layout is torch.strided else None
    return place, tensor.size(), tensor.dtype


def _write_tensor(tensor: torch.Tensor, contents: tuple) -> None:
    grad, requires_grad, memory, *values = contents
    if _memory_layout(tensor) != _memory_layout(memory):
        tensor.data = memory
    if tensor.is_leaf:
        tensor.requires_grad_(requires_grad)
        tensor.grad = grad
    if not values:
        return
    if not isinstance(values[0], bytes):
        if not same_tensors(values[0], memory):
            memory.copy_(values[0])
    elif _memory_bytes(memory) != values[0]:
        storage = memory.untyped_storage()
        if storage.nbytes() < _end_of(memory):
            storage.resize_(_end_of(memory))
        ctypes.memmove(memory.data_ptr(), values[0], len(values[0]))


def _module_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module, except the attributes that torch computes in each call.

    Torch's old `weight_norm` and `spectral_norm` compute a weight in each call, and a recurrent module builds lists of
    its weights.
    """
    derived = derived_names(attributes)
    return {name: value for name, value in attributes.items() if name not in derived} if derived else dict(attributes)


def derived_names(attributes: dict[str, Any]) -> set[str]:
    """Return the names of the attributes of a module that torch computes in each call."""
    hooks = forward_pre_hooks(attributes)
    return {hook.name for hook in hooks if isinstance(hook, _DERIVING_HOOKS)} | (RNN_WEIGHTS & attributes.keys())


def _write_dict_of(obj: Any, contents: dict[str, Any]) -> None:
    obj.__dict__ = contents["__dict__"]


def _write_type(obj: Any, contents: dict[str, type]) -> None:
    obj.__class__ = contents["__class__"]


def _write_module(attributes: dict[str, Any], contents: dict[str, Any]) -> None:
    for name in _module_attributes(attributes).keys() - contents.keys():
        del attributes[name]
    attributes.update(contents)


def _write_context_variable(variable: contextvars.ContextVar, value: Any) -> None:
    if value is MISSING:  # a variable cannot be unset again, only set to its default
        with contextlib.suppress(LookupError):  # it has no default
            variable.set(contextvars.Context().run(variable.get))
    else:
        variable.set(value)


def _write_variables(variables: MutableMapping[str, Any], contents: dict[str, Any]) -> None:
    """Write only the variables that differ, because other threads read the same ones."""
    for name in variables.keys() - contents.keys():
        del variables[name]
    variables.update({name: value for name, value in contents.items() if variables.get(name, MISSING) is not value})


LEAF_HOOKS = Kind(hooks_of_leaf, set_hooks_of_leaf, _compare_items("attribute"))
NO_DISPATCH = torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
CONTAINERS = (dict, collections.OrderedDict, set)
_DICT = Kind(dict.copy, _write_dict(dict), _compare_items("item"), _has_items)
_ORDERED = Kind(
    lambda obj: dict(collections.OrderedDict.items(obj)),
    _write_dict(collections.OrderedDict),
    _compare_items("item"),
    lambda obj, contents: _has_items(dict(collections.OrderedDict.items(obj)), contents),
)
LIST = Kind(
    lambda obj: obj[:],
    lambda obj, contents: list.__setitem__(obj, slice(None), contents),
    _compare_sequence,
    _has_elements,
)
DEQUE = Kind(list, _write_deque, _compare_sequence, _has_elements)
SET = Kind(set.copy, _write_set, _compare_sets)
MEMORY = Kind(_read_memory, _write_memory, _compare_value)
ARRAY = Kind(np.copy, _write_array, _compare_value)
CELL = Kind(
    lambda cell: read_cell(cell, MISSING),
    _write_cell,
    _compare_value,
    lambda cell, contents: read_cell(cell, MISSING) is contents,
)
GLOBALS = Kind(_read_globals, _write_globals, _compare_items("global"))
ALL_GLOBALS = Kind(dict.copy, _write_variables, _compare_items("global"), _has_items)
FACTORY = Kind(
    lambda obj: {"default_factory": obj.default_factory},
    lambda obj, contents: setattr(obj, "default_factory", contents["default_factory"]),
    _compare_items("attribute"),
)
TYPE = Kind(lambda obj: {"__class__": type(obj)}, _write_type, _compare_items("attribute"))
DICT_OF = Kind(lambda obj: {"__dict__": attributes_of(obj)}, _write_dict_of, _compare_identity)
CLASS = Kind(_read_class, _write_class, _compare_items("attribute"))
SLOTS = Kind(_read_slots, _write_slots, _compare_items("attribute"))
ATTRIBUTES = Kind(dict.copy, _write_dict(dict), _compare_items("attribute"), _has_items)
MODULE = Kind(_module_attributes, _write_module, _compare_items("attribute"), _has_items)
TENSOR = Kind(_read_tensor, _write_tensor, _compare_tensors, _has_memory)
SMALL_TENSOR = Kind(lambda t: (*_read_tensor(t), t.detach().clone()), _write_tensor, _compare_tensors)
DENSE_TENSOR = Kind(lambda t: (*_read_tensor(t), _memory_bytes(t)), _write_tensor, _compare_tensors, _has_bytes)
CONTEXT_VARIABLE = Kind(lambda obj: obj.get(MISSING), _write_context_variable, _compare_value)
FUNCTION = Kind(_read_function, _write_function, _compare_items("attribute"), _has_code)
PARTIAL = Kind(_read_partial, _write_partial, _compare_items("attribute"))
# A view cannot be written to. The dict behind it is restored if the function reaches the dict itself.
VIEW_OF_DICT = Kind(dict, lambda obj, contents: None, _compare_items("item"))
ENVIRONMENT = Kind(dict, _write_variables, _compare_items("item"))
_PYTHON_GENERATOR = Kind(lambda obj: obj.getstate(), lambda obj, state: obj.setstate(state), _compare_value)
_NUMPY_STATE = Kind(lambda obj: obj.get_state(legacy=False), lambda obj, state: obj.set_state(state), _compare_value)
_NUMPY_GENERATOR = Kind(
    lambda obj: obj.bit_generator.state,
    lambda obj, state: setattr(obj.bit_generator, "state", state),
    _compare_value,
)
_NUMPY_BITS = Kind(lambda obj: obj.state, lambda obj, state: setattr(obj, "state", state), _compare_value)
# Numpy offers no way to set the number of child seeds that were spawned.
_NUMPY_SEEDS = Kind(lambda obj: obj.n_children_spawned, lambda obj, number: None, _compare_value)
_TORCH_GENERATOR = Kind(lambda obj: obj.get_state(), lambda obj, state: obj.set_state(state), _compare_value)


def generator_kind(obj: Any) -> Kind | None:
    """Return the kind of a random generator; None for global generators, which other threads share."""
    if isinstance(obj, random.Random) and not isinstance(obj, random.SystemRandom) and obj is not GLOBAL_RANDOM:
        return _PYTHON_GENERATOR
    if isinstance(obj, np.random.RandomState) and obj is not GLOBAL_NUMPY_RANDOM:
        return _NUMPY_STATE
    if isinstance(obj, np.random.Generator):
        return _NUMPY_GENERATOR
    if isinstance(obj, np.random.BitGenerator):
        return _NUMPY_BITS
    if isinstance(obj, np.random.SeedSequence):
        return _NUMPY_SEEDS
    if isinstance(obj, torch.Generator) and obj is not torch.default_generator:
        return _TORCH_GENERATOR
    return None
