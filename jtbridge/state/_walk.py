"""A walk from a function to all mutable state that it reaches, which saves this state.

A function reaches its closures, its default arguments, the globals that its code or the code of a helper names, and the
object that a method belongs to; and from there attributes, slots, items of containers, methods and class attributes,
and the tensors of which a sparse tensor consists. Hooks of a tensor are reached from the tensor. Hooks for all modules
and optimizers are always reached. Functions and objects of torch, JAX, NumPy and the standard library are not followed,
except modules, optimizers, distributions, data sets, generators, containers, results in a ``functools.cache``, and
objects with memory such as `array.array`. Weak references are not followed either, because a snapshot would keep their
objects alive. State outside Python objects (of a C extension, of a file) is not seen.
"""

from __future__ import annotations

import abc
import argparse
import collections
import contextlib
import contextvars
import functools
import inspect
import os
import queue
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, Generic, Protocol

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from jtbridge._compat import (
    RNN_WEIGHTS,
    FakeTensor,
    ReleasedTensor,
    dispatch_cache,
    global_hooks,
    hidden_from_modes,
    innermost,
    writes,
)
from jtbridge.core.closures import closure_contents, read_cell
from jtbridge.core.definitions import module_of

from ._caches import CACHED_FUNCTION, CachedFunction
from ._comparison import PLAIN, VALUES
from ._escaped import PoisonTensor
from ._iterators import ITERATORS, copy_of, parts, position_of
from ._kinds import (
    ALL_GLOBALS,
    ARRAY,
    ATTRIBUTES,
    CELL,
    CLASS,
    CONTAINERS,
    CONTEXT_VARIABLE,
    DENSE_TENSOR,
    DEQUE,
    ENVIRONMENT,
    FACTORY,
    FUNCTION,
    GLOBAL_NUMPY_RANDOM,
    GLOBAL_RANDOM,
    GLOBALS,
    LEAF_HOOKS,
    LIST,
    MEMORY,
    METHODS,
    MODULE,
    NO_DISPATCH,
    PARTIAL,
    SET,
    SLOTS,
    SMALL_TENSOR,
    TENSOR,
    VIEW_OF_DICT,
    Kind,
    attributes_of,
    derived_names,
    generator_kind,
    has_memory,
    is_of_library,
    kind_of_dict,
    of_library,
    parts_of_tensor,
    slots,
)
from ._records import ClassAndDict, EmptyContainers, IteratorPosition, Record, StatePath

_MAX_OBJECTS = 200_000
_MAX_BYTES_OF_A_TENSOR = 1 << 14  # larger tensors are copied only before code takes their memory
_MAX_BYTES = 1 << 26  # of all arrays and tensors that are copied
_WRAPPERS = (CACHED_FUNCTION, functools.partial, *METHODS[1:])
_FOLLOWED = (
    *(torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler),
    *(torch.quasirandom.SobolEngine, torch.autograd.graph.saved_tensors_hooks),
    *(types.SimpleNamespace, argparse.Namespace),
    *(collections.UserDict, collections.UserList, collections.UserString, collections.ChainMap),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet, queue.Queue),
    threading.local,  # its attributes on this thread
    *(torch.distributions.Distribution, torch.utils.data.Dataset, contextlib.nullcontext),
)
_GENERATORS = (
    *(random.Random, torch.Generator, np.random.RandomState),
    *(np.random.Generator, np.random.BitGenerator, np.random.SeedSequence),
)
# Library classes that call no method of a subclass, except `forward` and special methods such as `__len__`.
_CALLING_FORWARD_ALONE = (object, torch.nn.Module, abc.ABC, Generic, Protocol)


class StateWalk:
    """The state that some objects reach, as it is now.

    Args:
        roots: the objects to start from, each with its name: the function, without a name, and its static arguments.

    Attributes:
        records: the contents of all objects that can change.
        objects: the classes and dicts of all objects that have them.
        empty: the empty containers of modules, which have no records.
        positions: the positions of iterators.
        versions: the number of writes to each tensor whose values are not saved.
        derived: the attributes of modules that torch computes in each call, each as attributes, name, value.
        caches: the functions that ``functools.cache`` or ``functools.lru_cache`` decorates.
        escaped: the places of tensors that escaped from a transform of `torch.func`.
        without_shape: the places of parameters and buffers of lazy modules that were not called yet.
        may_draw: whether the reached code names the global generator of Python or NumPy.
        names: the names of globals and attributes in the reached code.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]]):
        self.may_draw = False
        self.records: list[Record] = []
        self.objects: list[ClassAndDict] = []
        self.empty: list[EmptyContainers] = []
        self.positions: list[IteratorPosition] = []
        # Tensors whose values are not saved, with their write counts.
        self.versions: list[tuple[torch.Tensor, int]] = []
        self.derived: list[tuple[dict[str, Any], str, Any]] = []  # attributes of modules, computed in each call
        self.caches: list[CachedFunction] = []
        self.escaped: list[StatePath] = []
        self.without_shape: list[StatePath] = []
        self._seen: dict[int, Any] = {}  # by id; holding the objects keeps their ids from being used again
        self.names: set[str] = {"forward"}
        self._classes: set[type] = set()
        self._slots: dict[type, bool] = {}  # for the class of each visited object, whether it has slots
        self._methods: dict[str, list[tuple[Any, StatePath]]] = {}  # of `_classes`; no reached code names them yet
        self._modules: list[dict[str, Any]] = []  # the variables of the user's Python modules that are reached
        self._visitors: dict[type, Callable[[Any, StatePath], None]] = {}
        self._scopes: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._bytes = 0
        self._queue = collections.deque((root, StatePath(None, "root", name)) for name, root in roots)
        with hidden_from_modes():
            for name, hooks in global_hooks().items():
                if isinstance(hooks, dict):
                    self._record(hooks, kind_of_dict(hooks), StatePath(None, "global", name))
                self._hooks(hooks, StatePath(None, "global", name))
            while self._queue and len(self._seen) < _MAX_OBJECTS:
                self._visit(*self._queue.popleft())
            self._queue.clear()
            for scope, names in self._scopes.values():
                self._record((scope, names), GLOBALS, StatePath(None, "global", ""))

    def _visit(self, obj: Any, path: StatePath) -> None:
        if id(obj) in self._seen:
            return
        self._seen[id(obj)] = obj
        if isinstance(obj, types.BuiltinFunctionType | types.MethodType):
            self.may_draw |= obj.__self__ is GLOBAL_RANDOM or obj.__self__ is GLOBAL_NUMPY_RANDOM
        cls = type(obj)
        if cls not in self._visitors:
            self._visitors[cls] = self._visitor(obj)
        self._visitors[cls](obj, path)

    def _visitor(self, obj: Any) -> Callable[[Any, StatePath], None]:
        """Return the function that visits objects of the type of `obj`."""
        visit = self._visitor_of_kind(obj)
        if visit == self._object or isinstance(obj, torch.Tensor | types.FunctionType | type | types.ModuleType):
            return visit
        if is_of_library(type(obj)) and not isinstance(obj, _FOLLOWED):
            return visit

        def visit_subclass(obj: Any, path: StatePath) -> None:  # a container or a value of a user's class
            visit(obj, path)
            self._object(obj, path)

        return visit_subclass

    def _visitor_of_kind(self, obj: Any) -> Callable[[Any, StatePath], None]:
        """Return the function that visits objects of the kind of `obj`, but not the attributes of a user's subclass."""
        if isinstance(obj, types.BuiltinMethodType | types.MethodWrapperType):
            return self._method_in_c
        if isinstance(obj, VALUES):
            return _pass_by
        if isinstance(obj, torch.Tensor):
            if isinstance(obj, FakeTensor | PoisonTensor | ReleasedTensor):
                return _pass_by
            # A subclass that dispatches in Python has no memory to compare, but may consist of tensors.
            is_plain = type(obj).__torch_dispatch__ is NO_DISPATCH  # type: ignore[attr-defined]
            return self._tensor if is_plain else self._parts_of_tensor
        if module_of(type(obj)).startswith("scipy.sparse"):
            return self._object  # its attributes are arrays, lists or dicts
        for types_, visit in (
            (dict, self._dict),
            ((list, collections.deque), self._sequence),
            (set, self._set),
            (bytearray, lambda obj, path: self._record(obj, MEMORY, path)),
            (np.ndarray, self._array),
            (contextvars.ContextVar, self._context_variable),
            (types.MappingProxyType, self._view_of_dict),
            (type(os.environ), lambda obj, path: self._record(obj, ENVIRONMENT, path)),
            (np.vectorize, lambda obj, path: self._queue.append((obj.pyfunc, path))),
            (types.FunctionType, self._function),
            ((*ITERATORS, types.GeneratorType), self._iterator),
            (types.ModuleType, self._module),
            (type, self._class),
            (types.MethodType, self._method),
            ((tuple, frozenset), lambda obj, path: self._queue_all(path, "item", enumerate(obj))),
            (memoryview, lambda obj, path: self._queue.append((obj.obj, path))),
            (_GENERATORS, self._generator),
        ):
            if isinstance(obj, types_):
                return visit
        if isinstance(obj, _WRAPPERS):
            return self._wrapper
        if has_memory(obj):
            return self._memory
        if is_of_library(type(obj)) and not isinstance(obj, _FOLLOWED):
            return self._runner if hasattr(type(obj), "objects_of_the_user") else _pass_by
        return self._object

    def _dict(self, obj: dict, path: StatePath) -> None:
        self._record(obj, kind_of_dict(obj), path)
        if dict.__len__(obj):  # not `if obj`: for a subclass in transformers, it imports all models
            self._queue_all(path, "item", dict.items(obj))
        if isinstance(obj, collections.defaultdict):
            self._record(obj, FACTORY, path)
            self._queue.append((obj.default_factory, StatePath(path, "attribute", "default_factory")))

    def _sequence(self, obj: list | collections.deque, path: StatePath) -> None:
        self._record(obj, LIST if isinstance(obj, list) else DEQUE, path)
        self._queue_all(path, "item", enumerate(obj))

    def _set(self, obj: set, path: StatePath) -> None:
        self._record(obj, SET, path)
        self._queue_all(path, "item", enumerate(obj))

    def _context_variable(self, variable: contextvars.ContextVar, path: StatePath) -> None:
        self._record(variable, CONTEXT_VARIABLE, path)
        self._queue.append((variable.get(None), path))

    def _view_of_dict(self, view: types.MappingProxyType, path: StatePath) -> None:
        self._record(view, VIEW_OF_DICT, path)
        self._queue_all(path, "item", view.items())

    def _array(self, array: np.ndarray, path: StatePath) -> None:
        if array.flags.writeable and self._may_copy(array.nbytes):
            self._record(array, ARRAY, path)
        if array.dtype.hasobject and not array.dtype.names:
            self._queue_all(path, "item", enumerate(array.flat))

    def _memory(self, obj: Any, path: StatePath) -> None:
        if has_memory(obj) and self._may_copy(memoryview(obj).nbytes):
            self._record(obj, MEMORY, path)

    def _iterator(self, iterator: Any, path: StatePath) -> None:
        position = position_of(iterator)
        if position is not None:
            self.positions.append(IteratorPosition(iterator, position, copy_of(iterator), path))
            self._queue.extend((part, path) for part in parts(position))

    def _module(self, module: types.ModuleType, path: StatePath) -> None:
        if not of_library(module.__name__):
            self._modules.append(vars(module))
            self._scope(vars(module), self.names)

    def _method_in_c(self, method: types.BuiltinMethodType | types.MethodWrapperType, path: StatePath) -> None:
        """Visit the object of a bound method such as `items.append`, or `apply` of a Function in torch 2.15."""
        owner = method.__self__
        is_global_generator = owner is GLOBAL_RANDOM or owner is GLOBAL_NUMPY_RANDOM  # whose draws are watched
        if owner is not None and not isinstance(owner, types.ModuleType) and not is_global_generator:
            self._queue.append((owner, _or_self(path)))

    def _method(self, method: types.MethodType, path: StatePath) -> None:
        self._queue.append((method.__self__, _or_self(path)))
        self._queue.append((method.__func__, path))

    def _generator(self, generator: Any, path: StatePath) -> None:
        kind = generator_kind(generator)
        if kind is not None:
            self._record(generator, kind, path)
        if isinstance(generator, np.random.Generator):
            self._queue.append((generator.bit_generator, path))
        elif isinstance(generator, np.random.BitGenerator):
            self._queue.append((generator.seed_seq, path))

    def _record(self, obj: Any, kind: Kind, path: StatePath) -> None:
        self.records.append(Record(obj, kind, kind.read(obj), path))

    def _queue_all(self, path: StatePath, step: str, items: Iterable[tuple[Any, Any]]) -> None:
        for key, value in items:
            if type(value) not in PLAIN:
                self._queue.append((value, StatePath(path, step, key)))

    def _may_copy(self, size: int) -> bool:
        self._bytes += size
        return self._bytes <= _MAX_BYTES

    def _tensor(self, tensor: torch.Tensor, path: StatePath) -> None:
        if innermost(tensor) is not tensor:  # it escaped from a transform of torch.func, and cannot be used any more
            self.escaped.append(path)
            return
        if isinstance(tensor, UninitializedBuffer | UninitializedParameter):
            self.without_shape.append(path)
        is_dense = tensor.layout is torch.strided and not tensor.is_nested
        is_small = is_dense and tensor.is_cpu and tensor.nbytes <= _MAX_BYTES_OF_A_TENSOR
        if not (is_small and self._may_copy(tensor.nbytes)):
            kind = TENSOR
            self.versions.append((tensor, writes(tensor)))
        else:
            kind = DENSE_TENSOR if tensor.is_contiguous() else SMALL_TENSOR
        self._record(tensor, kind, path)
        if tensor.is_leaf and tensor.requires_grad:
            self._record(tensor, LEAF_HOOKS, path)
            for name, hooks in self.records[-1].contents.items():
                self._hooks(hooks, StatePath(path, "attribute", name))
        if tensor.is_leaf and tensor.grad is not None:
            self._queue.append((tensor.grad, StatePath(path, "attribute", "grad")))
        if not is_dense:
            self._parts_of_tensor(tensor, path)
        self._object(tensor, path)

    def _parts_of_tensor(self, tensor: torch.Tensor, path: StatePath) -> None:
        self._queue_all(path, "attribute", parts_of_tensor(tensor))

    def _hooks(self, hooks: Mapping[Any, Any], path: StatePath) -> None:
        """Visit hooks. The hook that torch makes for several tensors, for example, has the user's in its closure."""
        for key, hook in hooks.items():
            place = StatePath(path, "item", key)
            self._queue.append((hook, place))
            if isinstance(hook, types.FunctionType) and of_library(module_of(hook)):
                self._queue.extend((contents, place) for contents in closure_contents(hook))

    def _function(self, fn: types.FunctionType, path: StatePath) -> None:
        # `functools.wraps` may give a user's function a library's `__module__`, and a library's function the user's.
        if of_library(module_of(fn)) and of_library(fn.__globals__.get("__name__") or ""):
            return
        self._record(fn, FUNCTION, StatePath(None, "root", fn.__name__))
        for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                place = StatePath(None, "root", variable)
                self._record(cell, CELL, place)
                self._queue.append((read_cell(cell), place))
        if fn.__kwdefaults__ and id(fn.__kwdefaults__) not in self._seen:
            self._seen[id(fn.__kwdefaults__)] = fn.__kwdefaults__
            place = StatePath(StatePath(None, "root", fn.__name__), "attribute", "__kwdefaults__")
            self._record(fn.__kwdefaults__, kind_of_dict(fn.__kwdefaults__), place)
        defaults = fn.__defaults__ or ()
        names = fn.__code__.co_varnames[fn.__code__.co_argcount - len(defaults) :]
        for name, value in [*zip(names, defaults, strict=False), *(fn.__kwdefaults__ or {}).items()]:
            self._queue.append((value, StatePath(None, "root", name)))
        used = names_in(fn.__code__)
        self.may_draw |= "random" in used
        if "environ" in used:
            self._queue.append((os.environ, StatePath(None, "global", "os.environ")))
        if not of_library(fn.__globals__.get("__name__") or ""):  # a library's decorator has the user's `__module__`
            self._scope(fn.__globals__, used)
            # With `globals()`, the function may write variables that it does not name.
            if "globals" in used and id(fn.__globals__) not in self._seen:
                self._seen[id(fn.__globals__)] = fn.__globals__
                self._record(fn.__globals__, ALL_GLOBALS, StatePath(None, "global", ""))
        for name in used & sys.modules.keys():  # modules that the function may import
            self._queue.append((sys.modules[name], StatePath(None, "global", name)))
        new = used - self.names
        if new:
            self.names |= new
            for name in new & self._methods.keys():
                for method, place in self._methods.pop(name):
                    self._queue.extend((part, place) for part in _wrapped_by(method))
            for scope in self._modules:
                self._scope(scope, new)
        if (of_types := dispatch_cache(fn)) is not None:  # which is not state
            self._seen[id(of_types)] = of_types
        self._attributes(fn, StatePath(None, "root", fn.__name__))

    def _scope(self, scope: dict[str, Any], names: Set[str]) -> None:
        known = self._scopes.setdefault(id(scope), (scope, set()))[1]
        new = names - known
        known |= new
        for name in new & scope.keys():
            value = scope[name]
            if type(value) not in PLAIN:
                self._queue.append((value, StatePath(None, "global", name)))

    def _class(self, cls: type, path: StatePath) -> None:
        if cls in self._classes or is_of_library(cls):
            return
        self._classes.add(cls)
        self._record(cls, CLASS, path)
        for other in (*inspect.getmro(type(cls)), *cls.__mro__[1:]):  # `cls.name` may be an attribute of a base
            self._class(other, StatePath(None, "root", other.__name__))
        # A base class of a library may call any method, as torch calls the `backward` of an `autograd.Function`.
        is_called = any(is_of_library(base) and base not in _CALLING_FORWARD_ALONE for base in cls.__mro__)
        for name, value in vars(cls).items():
            if isinstance(value, METHODS):
                if is_called or name in self.names or name.startswith("__"):
                    self._queue.extend((part, path) for part in _wrapped_by(value))
                else:
                    self._methods.setdefault(name, []).append((value, path))
            elif not name.startswith("__") and type(value) not in PLAIN:
                self._queue.append((value, StatePath(path, "attribute", name)))

    def _wrapper(self, obj: Any, path: StatePath) -> None:
        """Visit a ``functools.partial``, a cached function, a property or a similar wrapper."""
        if isinstance(obj, functools.partial):
            self._record(obj, PARTIAL, path)
            self._attributes(obj, path)
            self._queue.extend((value, path) for value in (obj.func, *obj.args, *obj.keywords.values()))
            return
        if isinstance(obj, CACHED_FUNCTION):
            self.caches.append(CachedFunction(obj))
            self._queue_all(path, "item", self.caches[-1].results().items())
        self._queue.extend((part, path) for part in _wrapped_by(obj))

    def _runner(self, obj: Any, path: StatePath) -> None:
        """Visit the user's objects that an object of jtbridge runs, such as a wrapped function that is called."""
        for name, part in obj.objects_of_the_user():
            self._queue.append((part, StatePath(_or_self(path), "attribute", name) if name else path))

    def _object(self, obj: Any, path: StatePath) -> None:
        """Visit the class, the attributes and the slots of an object."""
        path, cls = _or_self(path), type(obj)
        attributes = attributes_of(obj)
        self.objects.append(
            ClassAndDict(obj, cls, attributes, attributes == {} and isinstance(obj, torch.Tensor), path)
        )
        self._attributes(obj, path)
        if cls not in self._slots:
            self._slots[cls] = bool(slots(cls))
            for base in cls.__mro__:
                self._class(base, StatePath(None, "root", base.__name__))
        if self._slots[cls]:
            self._record(obj, SLOTS, path)
            self._queue_all(path, "attribute", self.records[-1].contents.items())

    def _attributes(self, obj: Any, path: StatePath) -> None:
        attributes = attributes_of(obj)
        if attributes is not None and id(attributes) not in self._seen:
            self._seen[id(attributes)] = attributes
            if isinstance(obj, torch.nn.Module):
                self._attributes_of_module(attributes, path)
                return
            if attributes or not isinstance(obj, torch.Tensor):
                self._record(attributes, ATTRIBUTES, path)
            self._queue_all(path, "attribute", attributes.items())

    def _attributes_of_module(self, attributes: dict[str, Any], path: StatePath) -> None:
        self.derived += [(attributes, name, attributes.get(name)) for name in derived_names(attributes)]
        self._record(attributes, MODULE, path)
        # A module has more than ten dicts, most of which are empty. `EmptyContainers` tests all of these at once.
        empty = {name: value for name, value in attributes.items() if type(value) in CONTAINERS and not value}
        self.empty.append(EmptyContainers(tuple(empty), tuple(empty.values()), path))
        followed = (item for item in attributes.items() if item[0] not in empty and item[0] not in RNN_WEIGHTS)
        self._queue_all(path, "attribute", followed)


def _pass_by(obj: Any, path: StatePath) -> None:
    """Ignore an object that holds no state."""


def _or_self(path: StatePath) -> StatePath:
    """Return the path of an object, `self` if the object is the function itself or the object of a method."""
    return StatePath(None, "root", "self") if path == StatePath(None, "root", "") else path


def _wrapped_by(method: Any) -> list[Any]:
    """Return the parts of a method, a property, a cached function or a similar wrapper, and a function itself."""
    names = ("__func__", "fget", "fset", "fdel", "func", "args", "keywords", "__wrapped__", "dispatcher")
    parts = [getattr(method, name, None) for name in names]
    return [part for part in (*parts, method if isinstance(method, types.FunctionType) else None) if part is not None]


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a code object, and in the functions that it defines."""
    inner = (names_in(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(code.co_names).union(*inner)
