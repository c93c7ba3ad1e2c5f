"""Snapshots of the mutable state that a function reaches, taken before the function is traced.

Tracing runs a function on tensors without values. Python code in the function that counts calls, appends to a list,
advances an iterator or assigns an attribute really runs then. :class:`ReachableState` saves the state that the function
could change, names the changes afterwards with a readable path such as ``self.calls``, and restores the state.

A function reaches its closures, its default arguments, the globals that its code or the code of a helper names, and the
object that a method belongs to; and from there attributes, items of containers, methods and class attributes. Functions
and objects of torch, JAX, NumPy and the standard library are not followed, except modules, optimizers and containers.
State outside Python objects (of a C extension, of a file) and the contents of ``functools.cache`` are not seen.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import json
import operator
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from jtbridge._compat import FakeTensor, outside_modes

from ._escaped import PoisonTensor

_MISSING = object()
_MOST_OBJECTS = 200_000
_MOST_BYTES_OF_A_TENSOR = 1 << 14  # larger tensors are not copied: only a write by NumPy could go unseen
_MOST_BYTES = 1 << 26  # of all arrays and tensors that are copied
_DEPTH = 20  # how deep two new objects are compared
_LIBRARIES = sys.stdlib_module_names | {
    *("torch", "torchgen", "functorch", "triton", "jax", "jaxlib", "numpy", "scipy", "sympy", "jtbridge"),
    *("typing_extensions", "ml_dtypes", "pytest", "_pytest", "pluggy", "hypothesis"),
}
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
VALUES = (
    *_PLAIN,
    *(range, slice, type(...), torch.layout, torch.memory_format, np.generic, np.dtype),
    *(types.CodeType, types.BuiltinFunctionType, types.GetSetDescriptorType, types.MemberDescriptorType),
)
_ITERTOOLS = (
    *("accumulate", "batched", "chain", "combinations", "combinations_with_replacement", "compress", "count", "cycle"),
    *("dropwhile", "filterfalse", "groupby", "islice", "pairwise", "permutations", "product", "repeat", "starmap"),
    *("takewhile", "zip_longest"),
)
_ITERATORS = (
    *(type(iter(made)) for made in ([], (), "", "é", b"", bytearray(), set(), range(0), range(1 << 70))),
    *(type(iter(made)) for made in ({}, {}.values(), {}.items(), collections.deque(), collections.OrderedDict())),
    *(type(reversed(made)) for made in ([], {}, {}.values(), {}.items(), ())),  # type: ignore[call-overload]
    *(enumerate, zip, map, filter),
    *(getattr(itertools, name) for name in _ITERTOOLS if hasattr(itertools, name)),
)
_METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
_WRAPPERS = (type(functools.cache(lambda: None)), functools.partial, *_METHODS[1:])
_FOLLOWED = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, types.SimpleNamespace)
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
# Torch's old hooks that compute a weight from others before each call, and assign it to the module.
_DERIVING_HOOKS = (WeightNorm, SpectralNorm)

GLOBAL_RANDOM = random.random.__self__  # type: ignore[attr-defined]
GLOBAL_NUMPY_RANDOM = np.random.rand.__self__  # type: ignore[attr-defined]


class Path(NamedTuple):
    """Path to an object: the path of its holder, and the step from there ("root", "global", "attribute" or "item").

    A root is a variable of a closure or an argument. The path of a root has no parent.
    """

    parent: Path | None
    kind: str
    key: Any

    def __str__(self) -> str:
        if self.parent is None:
            return str(self.key)
        holder = self.parent
        if self.kind == "item" and holder.kind == "attribute" and holder.key in _MODULE_TABLES and holder.parent:
            digits = str(self.key).isdigit()
            return f"{holder.parent}[{self.key}]" if digits else str(Path(holder.parent, "attribute", self.key))
        if self.kind == "attribute":
            return f"{holder}.{self.key}" if str(holder) else str(self.key)
        return f"{holder}[{json.dumps(self.key) if isinstance(self.key, str) else repr(self.key)}]"

    @property
    def is_global(self) -> bool:
        """Return whether the object is a global variable, or is reached from one."""
        return self.kind == "global" or (self.parent is not None and self.parent.is_global)


class Change(NamedTuple):
    """One change of state: where it is, and its values before and after."""

    path: Path
    before: Any
    after: Any

    @property
    def depends_on_arguments(self) -> bool:
        """Return whether the new value holds a tensor of the trace that depends on the arguments."""
        return _holds_traced(self.after, _DEPTH)

    def __str__(self) -> str:
        return f"{'global ' if self.path.is_global else ''}`{self.path}`"


class _Kind(NamedTuple):
    """Functions that read, write and compare one kind of mutable object."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    compare: Callable[[Any, Any], Iterator[tuple[str, Any, Any, Any]]]  # yields step, key, before, after
    # A fast test whether an object certainly still has the saved contents, as nearly all objects do.
    is_unchanged: Callable[[Any, Any], bool] = lambda thing, contents: False


class _Record(NamedTuple):
    thing: Any
    kind: _Kind
    contents: Any
    path: Path

    def differences(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """Return the differences between the saved and the present contents, each as step, key, before, after."""
        if self.kind.is_unchanged(self.thing, self.contents):
            return iter(())
        return self.kind.compare(self.contents, self.kind.read(self.thing))

    def is_changed(self) -> bool:
        return any(True for _ in self.differences())


class _EmptyContainers(NamedTuple):
    """The dicts and sets of a module that were empty when the state was saved, such as its tables of hooks."""

    names: Sequence[str]
    containers: Sequence[dict | set]
    path: Path  # of the module

    def filled(self) -> Iterator[_Record]:
        """Yield records of the containers that are no longer empty."""
        for name, container in zip(self.names, self.containers, strict=True):
            if container:
                kind = _SET if isinstance(container, set) else _kind_of_dict(container)
                yield _Record(container, kind, type(container)(), Path(self.path, "attribute", name))


class _Position(NamedTuple):
    iterator: Any
    position: Any
    copy: Any  # None where it cannot be copied
    path: Path


class ReachableState:
    """Snapshot of the state that some objects reach.

    Args:
        roots: the objects to start from, each with its name: the function, without a name, and its static arguments.

    Attributes:
        may_draw: whether the reached code names the global generator of Python or NumPy.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]]):
        self.may_draw = False
        self._records: list[_Record] = []
        self._empty: list[_EmptyContainers] = []
        self._positions: list[_Position] = []
        self._derived: list[tuple[dict[str, Any], str, Any]] = []  # attributes of modules, computed in each call
        self._seen: dict[int, Any] = {}  # by id; holding the objects keeps their ids from being used again
        self._names: set[str] = {"forward"}  # the names of globals and attributes in the reached code
        self._classes: set[type] = set()
        self._methods: dict[str, list[tuple[Any, Path]]] = {}  # methods of these classes that no reached code names yet
        self._modules: list[dict[str, Any]] = []  # the variables of the user's Python modules that are reached
        self._visitors: dict[type, Callable[[Any, Path], None]] = {}
        self._scopes: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._bytes = 0
        self._queue = collections.deque((root, Path(None, "root", name)) for name, root in roots)
        with outside_modes(), torch.no_grad():
            while self._queue and len(self._seen) < _MOST_OBJECTS:
                self._visit(*self._queue.popleft())
            self._queue.clear()
            for scope, names in self._scopes.values():
                self._record((scope, names), _GLOBALS, Path(None, "global", ""))

    def differences(self) -> list[Change]:
        """Return the changes of the state since the snapshot."""
        found = []
        with outside_modes(), torch.no_grad():
            for record in self._all_records():
                for step, key, before, after in record.differences():
                    is_global = record.kind is _GLOBALS
                    parent = record.path
                    place = Path(None, "global", key) if is_global else Path(parent, step, key) if step else parent
                    found.append(Change(place, before, after))
            found += [Change(found_.path, found_.position, found_.iterator) for found_ in self._advanced()]
        return found

    def changed_part(self) -> ReachableState:
        """Return the part of the snapshot whose state has changed since."""
        part = ReachableState(())
        with outside_modes(), torch.no_grad():
            part._records = [record for record in self._all_records() if record.is_changed()]
            part._positions = self._advanced()
        return part

    def tensors(self) -> Iterator[tuple[torch.Tensor, Path]]:
        """Return the tensors in the snapshot, each with its path."""
        kinds = (_TENSOR, _SMALL_TENSOR, _DENSE_TENSOR)
        return ((record.thing, record.path) for record in self._records if record.kind in kinds)

    def restore(self) -> None:
        """Restore the state, except Python generators that were advanced and iterators that cannot be copied."""
        with outside_modes(), torch.no_grad():
            fresh = {id(found.iterator): found.copy for found in self._advanced() if found.copy is not None}
            for record in self._all_records():
                wanted = _replaced(record.contents, fresh) if fresh else record.contents
                if wanted is not record.contents or record.is_changed():
                    record.kind.write(record.thing, wanted)

    def restore_derived(self) -> None:
        """Restore the module attributes that torch computes in each call: derived weights, lists of RNN weights."""
        for attributes, name, value in self._derived:
            attributes[name] = value

    def _all_records(self) -> Iterator[_Record]:
        yield from self._records
        for empty in self._empty:
            if any(empty.containers):
                yield from empty.filled()

    def _advanced(self) -> list[_Position]:
        return [known for known in self._positions if not same(known.position, _position(known.iterator))]

    def _visit(self, thing: Any, path: Path) -> None:
        if id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing
        cls = type(thing)
        if cls not in self._visitors:
            self._visitors[cls] = self._visitor(thing)
        self._visitors[cls](thing, path)

    def _visitor(self, thing: Any) -> Callable[[Any, Path], None]:
        """Return the method that visits objects of the type of `thing`."""
        if isinstance(thing, VALUES):
            return _pass_by
        if isinstance(thing, torch.Tensor):
            # A subclass that dispatches in Python has no memory of its own to compare.
            is_plain = type(thing).__torch_dispatch__ is _NO_DISPATCH  # type: ignore[attr-defined]
            return self._tensor if is_plain and not isinstance(thing, FakeTensor | PoisonTensor) else _pass_by
        for types_, visit in (
            (dict, self._dict),
            ((list, collections.deque), self._sequence),
            (set, self._set),
            (bytearray, lambda thing, path: self._record(thing, _BYTES, path)),
            (np.ndarray, self._array),
            (types.FunctionType, self._function),
            ((*_ITERATORS, types.GeneratorType), self._iterator),
            (types.ModuleType, self._module),
            (type, self._class),
            (types.MethodType, self._method),
            ((tuple, frozenset), lambda thing, path: self._queue_all(path, "item", enumerate(thing))),
            ((random.Random, np.random.RandomState, np.random.Generator, torch.Generator), self._generator),
        ):
            if isinstance(thing, types_):
                return visit
        if isinstance(thing, _WRAPPERS):
            return self._wrapper
        if of_library(type(thing).__module__) and not isinstance(thing, _FOLLOWED):
            return _pass_by
        for base in type(thing).__mro__:
            self._class(base, Path(None, "root", base.__name__))
        return self._object_with_slots if _slots(type(thing)) else self._object

    def _dict(self, thing: dict, path: Path) -> None:
        self._record(thing, _kind_of_dict(thing), path)
        if thing:
            self._queue_all(path, "item", dict.items(thing))
        self._subclass(thing, path)

    def _sequence(self, thing: list | collections.deque, path: Path) -> None:
        self._record(thing, _LIST if isinstance(thing, list) else _DEQUE, path)
        self._queue_all(path, "item", enumerate(thing))
        self._subclass(thing, path)

    def _set(self, thing: set, path: Path) -> None:
        self._record(thing, _SET, path)
        self._queue_all(path, "item", enumerate(thing))
        self._subclass(thing, path)

    def _subclass(self, thing: Any, path: Path) -> None:
        """Visit the attributes and the class of a container, if its class is a user's subclass."""
        if not of_library(type(thing).__module__):
            self._attributes(thing, path)
            self._class(type(thing), Path(None, "root", type(thing).__name__))

    def _array(self, array: np.ndarray, path: Path) -> None:
        if array.flags.writeable and self._may_copy(array.nbytes):
            self._record(array, _ARRAY, path)

    def _iterator(self, iterator: Any, path: Path) -> None:
        position = _position(iterator)
        if position is not None:
            self._positions.append(_Position(iterator, position, _copy_of(iterator), path))
            self._queue.extend((part, path) for part in _parts(position))

    def _module(self, module: types.ModuleType, path: Path) -> None:
        if not of_library(module.__name__):
            self._modules.append(vars(module))
            self._scope(vars(module), self._names)

    def _method(self, method: types.MethodType, path: Path) -> None:
        self._queue.append((method.__self__, _or_self(path)))
        self._queue.append((method.__func__, path))

    def _generator(self, generator: Any, path: Path) -> None:
        kind = _generator_kind(generator)
        if kind is not None:
            self._record(generator, kind, path)

    def _record(self, thing: Any, kind: _Kind, path: Path) -> None:
        self._records.append(_Record(thing, kind, kind.read(thing), path))

    def _queue_all(self, path: Path, step: str, items: Iterable[tuple[Any, Any]]) -> None:
        for key, value in items:
            if type(value) not in _PLAIN:
                self._queue.append((value, Path(path, step, key)))

    def _may_copy(self, size: int) -> bool:
        self._bytes += size
        return self._bytes <= _MOST_BYTES

    def _tensor(self, tensor: torch.Tensor, path: Path) -> None:
        is_small = tensor.layout is torch.strided and tensor.is_cpu and tensor.nbytes <= _MOST_BYTES_OF_A_TENSOR
        if not (is_small and self._may_copy(tensor.nbytes)):
            kind = _TENSOR
        else:
            kind = _DENSE_TENSOR if tensor.is_contiguous() else _SMALL_TENSOR
        self._record(tensor, kind, path)
        self._attributes(tensor, path)

    def _function(self, fn: types.FunctionType, path: Path) -> None:
        if of_library(fn.__module__ or ""):
            return
        for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                place = Path(None, "root", variable)
                self._record(cell, _CELL, place)
                self._queue.append((_read_cell(cell), place))
        defaults = fn.__defaults__ or ()
        names = fn.__code__.co_varnames[fn.__code__.co_argcount - len(defaults) :]
        for name, value in [*zip(names, defaults, strict=False), *(fn.__kwdefaults__ or {}).items()]:
            self._queue.append((value, Path(None, "root", name)))
        used = names_in(fn.__code__)
        self.may_draw |= "random" in used
        self._scope(fn.__globals__, used)
        new = used - self._names
        if new:
            self._names |= new
            for name in new & self._methods.keys():
                for method, place in self._methods.pop(name):
                    self._queue.extend((inner, place) for inner in _functions_of(method))
            for scope in self._modules:
                self._scope(scope, new)
        self._attributes(fn, Path(None, "root", fn.__name__))

    def _scope(self, scope: dict[str, Any], names: Set[str]) -> None:
        known = self._scopes.setdefault(id(scope), (scope, set()))[1]
        new = names - known
        known |= new
        for name in new & scope.keys():
            value = scope[name]
            if isinstance(value, types.BuiltinFunctionType | types.MethodType):
                self.may_draw |= value.__self__ is GLOBAL_RANDOM or value.__self__ is GLOBAL_NUMPY_RANDOM
            if type(value) not in _PLAIN:
                self._queue.append((value, Path(None, "global", name)))

    def _class(self, cls: type, path: Path) -> None:
        if cls in self._classes or of_library(cls.__module__):
            return
        self._classes.add(cls)
        self._record(cls, _CLASS, path)
        for name, value in vars(cls).items():
            if isinstance(value, _METHODS):
                if name in self._names or name.startswith("__"):
                    self._queue.extend((fn, path) for fn in _functions_of(value))
                else:
                    self._methods.setdefault(name, []).append((value, path))
            elif not name.startswith("__") and type(value) not in _PLAIN:
                self._queue.append((value, Path(path, "attribute", name)))

    def _wrapper(self, thing: Any, path: Path) -> None:
        """Visit a ``functools.partial``, a cached function, a property or a similar wrapper."""
        if isinstance(thing, functools.partial):
            self._queue.extend((value, path) for value in (thing.func, *thing.args, *thing.keywords.values()))
        self._queue.extend((fn, path) for fn in _functions_of(thing))

    def _object(self, thing: Any, path: Path) -> None:
        self._attributes(thing, _or_self(path))

    def _object_with_slots(self, thing: Any, path: Path) -> None:
        path = _or_self(path)
        self._attributes(thing, path)
        self._record(thing, _SLOTS, path)
        self._queue_all(path, "attribute", self._records[-1].contents.items())

    def _attributes(self, thing: Any, path: Path) -> None:
        attributes = getattr(thing, "__dict__", None)
        if isinstance(attributes, dict) and id(attributes) not in self._seen:
            self._seen[id(attributes)] = attributes
            if isinstance(thing, torch.nn.Module):
                self._attributes_of_module(attributes, path)
                return
            if attributes or not isinstance(thing, torch.Tensor):
                self._record(attributes, _ATTRIBUTES, path)
            self._queue_all(path, "attribute", attributes.items())

    def _attributes_of_module(self, attributes: dict[str, Any], path: Path) -> None:
        self._derived += [(attributes, name, attributes.get(name)) for name in _derived(attributes)]
        self._record(attributes, _MODULE, path)
        # A module has more than ten dicts, most of which are empty. One test shows that all of them are still empty.
        empty = {name: value for name, value in attributes.items() if type(value) in _CONTAINERS and not value}
        self._empty.append(_EmptyContainers(tuple(empty), tuple(empty.values()), path))
        followed = (item for item in attributes.items() if item[0] not in empty and item[0] not in _RNN_WEIGHTS)
        self._queue_all(path, "attribute", followed)


def _pass_by(thing: Any, path: Path) -> None:
    """Ignore an object that holds no state."""


def _or_self(path: Path) -> Path:
    """Return the path of an object, `self` if the object is the function itself or the object of a method."""
    return Path(None, "root", "self") if path == Path(None, "root", "") else path


def _functions_of(method: Any) -> list[types.FunctionType]:
    """Return the functions behind a method, a property or a cached function."""
    parts = [method, *(getattr(method, name, None) for name in ("__func__", "fget", "func", "__wrapped__"))]
    return [part for part in parts if isinstance(part, types.FunctionType)]


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a code object, and in the functions that it defines."""
    inner = (names_in(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def same(a: Any, b: Any, depth: int = _DEPTH) -> bool:
    """Return whether two values are interchangeable: the same object, or objects of one type with equal contents."""
    if a is b:
        return True
    if type(a) is not type(b) or depth == 0 or isinstance(a, FakeTensor | PoisonTensor):
        return False
    if isinstance(a, torch.Tensor):
        return _same_tensors(a, b)
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float | complex):
        return a == b or (a != a and b != b)
    if isinstance(a, (*VALUES, types.MethodType)):
        return bool(a == b)
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(same(x, y, depth - 1) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m, depth - 1) and same(v, w, depth - 1) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, set | frozenset | bytearray):
        return a == b
    if isinstance(a, types.FunctionType):
        return a.__code__ is b.__code__ and same(_closed_over(a), _closed_over(b), depth - 1)
    attributes = getattr(a, "__dict__", None)
    return isinstance(attributes, dict) and same(attributes, b.__dict__, depth - 1)


def _same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if any(getattr(a, name) != getattr(b, name) for name in ("shape", "dtype", "device", "layout", "requires_grad")):
        return False
    if a.layout is not torch.strided or a.dtype.is_complex or a.is_quantized:
        return a.layout is torch.strided and torch.equal(a.detach(), b.detach())
    return torch.allclose(a.detach(), b.detach(), rtol=0, atol=0, equal_nan=True)


def _closed_over(fn: types.FunctionType) -> list[Any]:
    return [*map(_read_cell, fn.__closure__ or ()), fn.__defaults__, fn.__kwdefaults__]


def _holds_traced(value: Any, depth: int) -> bool:
    if isinstance(value, FakeTensor | PoisonTensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    if depth == 0 or isinstance(value, (torch.Tensor, type, types.ModuleType, *VALUES)):
        return isinstance(value, torch.Tensor) and value.is_leaf and isinstance(value.grad, FakeTensor | PoisonTensor)
    if isinstance(value, dict):
        return any(_holds_traced(part, depth - 1) for part in [*dict.keys(value), *dict.values(value)])
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return any(_holds_traced(part, depth - 1) for part in value)
    attributes = getattr(value, "__dict__", None)
    is_walked = isinstance(attributes, dict) and not isinstance(value, types.FunctionType)
    return is_walked and _holds_traced(attributes, min(depth - 1, 3))  # objects may refer to each other in a circle


@functools.lru_cache(maxsize=1024)
def of_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES or module == "builtins"


def _slots(cls: type) -> list[str]:
    names = [vars(base).get("__slots__", ()) for base in cls.__mro__ if not of_library(base.__module__)]
    flat = [name for found in names for name in ([found] if isinstance(found, str) else found)]
    return [name for name in flat if not name.startswith("__")]


# --- Kinds of objects ------------------------------------------------------------------------------------------------


def _compare_items(step: str) -> Callable[[dict, dict], Iterator[tuple[str, Any, Any, Any]]]:
    def compare(before: dict, after: dict) -> Iterator[tuple[str, Any, Any, Any]]:
        if len(before) == len(after) and all(
            k is m and v is w for (k, v), (m, w) in zip(before.items(), after.items(), strict=True)
        ):
            return
        for key in [*before, *(key for key in after if key not in before)]:
            was, now = before.get(key, _MISSING), after.get(key, _MISSING)
            if not same(was, now):
                yield step, key, was, now

    return compare


def _has_items(thing: dict, contents: dict) -> bool:
    """Return whether a dict has the same objects as another one, in the same order."""
    return (
        len(thing) == len(contents)
        and all(map(operator.is_, dict.values(thing), dict.values(contents)))
        and all(map(operator.is_, dict.keys(thing), dict.keys(contents)))
    )


def _has_elements(thing: Sequence[Any], contents: Sequence[Any]) -> bool:
    return len(thing) == len(contents) and all(map(operator.is_, thing, contents))


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
            changed = _memory(was) != _memory(now)
        else:
            changed = not same(was, now)
        if changed:
            yield "attribute", name, was, now
    if len(before) > 3:
        values, memory = before[3], after[2]
        has_values = _bytes_of(memory) == values if isinstance(values, bytes) else same(values, memory)
        if not has_values:
            yield "", None, values, memory


def _compare_sets(before: set, after: set) -> Iterator[tuple[str, Any, Any, Any]]:
    if len(before) != len(after) or before != after:
        yield "", None, before, after


def _kind_of_dict(thing: dict) -> _Kind:
    return _ORDERED if isinstance(thing, collections.OrderedDict) else _DICT


def _write_dict(base: type) -> Callable[[dict, dict], None]:
    def write(thing: dict, contents: dict) -> None:
        base.clear(thing)  # type: ignore[attr-defined]
        for key, value in contents.items():
            base.__setitem__(thing, key, value)  # type: ignore[attr-defined]

    return write


def _write_deque(thing: collections.deque, contents: list[Any]) -> None:
    thing.clear()
    thing.extend(contents)


def _write_set(thing: set, contents: set) -> None:
    set.clear(thing)
    set.update(thing, contents)


def _write_bytes(thing: bytearray, contents: bytes) -> None:
    thing[:] = contents


def _write_array(thing: np.ndarray, contents: np.ndarray) -> None:
    thing[...] = contents


def _read_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _MISSING


def _write_cell(cell: types.CellType, contents: Any) -> None:
    if contents is _MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = contents


def _read_globals(thing: tuple[dict[str, Any], set[str]]) -> dict[str, Any]:
    scope, names = thing
    return {name: scope[name] for name in names if name in scope}


def _write_globals(thing: tuple[dict[str, Any], set[str]], contents: dict[str, Any]) -> None:
    scope, names = thing
    for name in names:
        if name in contents:
            scope[name] = contents[name]
        else:
            scope.pop(name, None)


def _read_class(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if not name.startswith(("__", "_abc_"))}


def _write_class(cls: type, contents: dict[str, Any]) -> None:
    now = _read_class(cls)
    for name in now.keys() - contents.keys():
        delattr(cls, name)
    for name, value in contents.items():
        if now.get(name, _MISSING) is not value:
            setattr(cls, name, value)


def _read_slots(thing: Any) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in _slots(type(thing)) if hasattr(thing, name)}


def _write_slots(thing: Any, contents: dict[str, Any]) -> None:
    for name in _slots(type(thing)):
        if name in contents:
            object.__setattr__(thing, name, contents[name])
        elif hasattr(thing, name):
            object.__delattr__(thing, name)


def _read_tensor(tensor: torch.Tensor) -> tuple:
    return (tensor.grad if tensor.is_leaf else None), tensor.requires_grad, tensor.detach()


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the memory of a contiguous tensor on the CPU, of any dtype, in a tenth of the time of a clone."""
    size = tensor.nbytes
    fits = size and _end_of(tensor) <= tensor.untyped_storage().nbytes()  # a storage may have shrunk
    return ctypes.string_at(tensor.data_ptr(), size) if fits else b""


def _end_of(tensor: torch.Tensor) -> int:
    """Return the byte offset in its storage at which a contiguous tensor ends."""
    return int(tensor.storage_offset()) * tensor.itemsize + tensor.nbytes


def _has_bytes(tensor: torch.Tensor, contents: tuple) -> bool:
    grad, requires_grad, memory, values = contents
    return (
        tensor.requires_grad is requires_grad
        and (not tensor.is_leaf or tensor.grad is grad)
        and _memory(tensor) == _memory(memory)
        and _bytes_of(tensor) == values
    )


def _has_memory(tensor: torch.Tensor, contents: tuple) -> bool:
    grad, requires_grad, memory = contents
    return (
        tensor.requires_grad is requires_grad
        and (not tensor.is_leaf or tensor.grad is grad)
        and _memory(tensor) == _memory(memory)
    )


def _memory(tensor: torch.Tensor) -> Any:
    place = tensor.data_ptr() if tensor.layout is torch.strided else None
    return place, tensor.shape, tensor.dtype


def _write_tensor(tensor: torch.Tensor, contents: tuple) -> None:
    grad, requires_grad, memory, *values = contents
    if _memory(tensor) != _memory(memory):
        tensor.data = memory
    if tensor.is_leaf:
        tensor.requires_grad_(requires_grad)
        tensor.grad = grad
    if not values:
        return
    if not isinstance(values[0], bytes):
        if not _same_tensors(values[0], memory):
            memory.copy_(values[0])
    elif _bytes_of(memory) != values[0]:
        storage = memory.untyped_storage()
        if storage.nbytes() < _end_of(memory):
            storage.resize_(_end_of(memory))
        ctypes.memmove(memory.data_ptr(), values[0], len(values[0]))


def _module_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module, except the attributes that torch computes in each call.

    Torch's old weight_norm and spectral_norm compute weights in each call. A recurrent module renews the lists of its
    weights whenever one of the weights is assigned, as `torch.func.functional_call` does.
    """
    derived = _derived(attributes)
    return {name: value for name, value in attributes.items() if name not in derived} if derived else dict(attributes)


def _derived(attributes: dict[str, Any]) -> set[str]:
    hooks = attributes.get("_forward_pre_hooks") or {}
    return {hook.name for hook in hooks.values() if isinstance(hook, _DERIVING_HOOKS)} | (
        _RNN_WEIGHTS & attributes.keys()
    )


_RNN_WEIGHTS = frozenset({"_flat_weights", "_flat_weight_refs"})


def _write_module(attributes: dict[str, Any], contents: dict[str, Any]) -> None:
    for name in _module_attributes(attributes).keys() - contents.keys():
        del attributes[name]
    attributes.update(contents)


_NO_DISPATCH = torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
_CONTAINERS = (dict, collections.OrderedDict, set)
_DICT = _Kind(dict.copy, _write_dict(dict), _compare_items("item"), _has_items)
_ORDERED = _Kind(
    lambda thing: dict(dict.items(thing)),
    _write_dict(collections.OrderedDict),
    _compare_items("item"),
    _has_items,
)
_LIST = _Kind(
    lambda thing: thing[:],
    lambda thing, contents: list.__setitem__(thing, slice(None), contents),
    _compare_sequence,
    _has_elements,
)
_DEQUE = _Kind(list, _write_deque, _compare_sequence, _has_elements)
_SET = _Kind(set.copy, _write_set, _compare_sets)
_BYTES = _Kind(bytes, _write_bytes, _compare_value)
_ARRAY = _Kind(np.copy, _write_array, _compare_value)
_CELL = _Kind(_read_cell, _write_cell, _compare_value, lambda cell, contents: _read_cell(cell) is contents)
_GLOBALS = _Kind(_read_globals, _write_globals, _compare_items("global"))
_CLASS = _Kind(_read_class, _write_class, _compare_items("attribute"))
_SLOTS = _Kind(_read_slots, _write_slots, _compare_items("attribute"))
_ATTRIBUTES = _Kind(dict.copy, _write_dict(dict), _compare_items("attribute"), _has_items)
_MODULE = _Kind(_module_attributes, _write_module, _compare_items("attribute"), _has_items)
_TENSOR = _Kind(_read_tensor, _write_tensor, _compare_tensors, _has_memory)
_SMALL_TENSOR = _Kind(lambda t: (*_read_tensor(t), t.detach().clone()), _write_tensor, _compare_tensors)
_DENSE_TENSOR = _Kind(lambda t: (*_read_tensor(t), _bytes_of(t)), _write_tensor, _compare_tensors, _has_bytes)
_PYTHON_GENERATOR = _Kind(lambda thing: thing.getstate(), lambda thing, state: thing.setstate(state), _compare_value)
_NUMPY_STATE = _Kind(
    lambda thing: thing.get_state(legacy=False), lambda thing, state: thing.set_state(state), _compare_value
)
_NUMPY_GENERATOR = _Kind(
    lambda thing: thing.bit_generator.state,
    lambda thing, state: setattr(thing.bit_generator, "state", state),
    _compare_value,
)
_TORCH_GENERATOR = _Kind(lambda thing: thing.get_state(), lambda thing, state: thing.set_state(state), _compare_value)


def _generator_kind(thing: Any) -> _Kind | None:
    """Return how to save the state of a random generator; None for global generators, which other threads share."""
    if isinstance(thing, random.Random) and not isinstance(thing, random.SystemRandom) and thing is not GLOBAL_RANDOM:
        return _PYTHON_GENERATOR
    if isinstance(thing, np.random.RandomState) and thing is not GLOBAL_NUMPY_RANDOM:
        return _NUMPY_STATE
    if isinstance(thing, np.random.Generator):
        return _NUMPY_GENERATOR
    if isinstance(thing, torch.Generator) and thing is not torch.default_generator:
        return _TORCH_GENERATOR
    return None


# --- Iterators -------------------------------------------------------------------------------------------------------


def _position(iterator: Any) -> Any:
    """Return a value that differs once an iterator has advanced; None if there is no such value."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return () if frame is None else (frame.f_lasti, tuple(frame.f_locals.values()))
    try:
        reduced = iterator.__reduce__()
    except (TypeError, Warning):  # iterators of itertools cannot be copied from Python 3.14 on
        return repr(iterator) if isinstance(iterator, itertools.count | itertools.repeat) else None
    return _map_iterators(_position, reduced)


def _copy_of(iterator: Any) -> Any:
    if isinstance(iterator, types.GeneratorType):
        return None
    try:
        make, args, *state = _map_iterators(_copy_of, iterator.__reduce__())
        copy = make(*args)
        if state and state[0] is not None:
            copy.__setstate__(state[0])
    except (TypeError, Warning):
        return None
    return copy


def _map_iterators(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_map_iterators(change, part) for part in value)
    return change(value) if isinstance(value, (*_ITERATORS, types.GeneratorType)) else value


def _parts(position: Any) -> Iterator[Any]:
    if isinstance(position, tuple):
        for part in position:
            yield from _parts(part)
    else:
        yield position


def _replaced(contents: Any, fresh: dict[int, Any]) -> Any:
    """Return the contents of an object with fresh iterators in place of advanced ones."""
    if isinstance(contents, dict) and any(id(value) in fresh for value in contents.values()):
        return {key: fresh.get(id(value), value) for key, value in contents.items()}
    if isinstance(contents, list) and any(id(value) in fresh for value in contents):
        return [fresh.get(id(value), value) for value in contents]
    return fresh.get(id(contents), contents)
