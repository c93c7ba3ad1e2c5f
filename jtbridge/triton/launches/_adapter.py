"""Adapters: kernels with jax-triton's order of parameters that call the user's kernel.

jax-triton passes the inputs, then the results, then the constants.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import linecache
import types
from collections.abc import Mapping, Sequence
from typing import Any

from jtbridge.triton._ir import LANGUAGE_TYPES, jit_function, scalar_type
from jtbridge.triton._versions import passes_aliases_twice

from ._launch import OPTIONS, Launch, LaunchConfiguration
from ._memory import MemoryView


@dataclasses.dataclass(frozen=True)
class AdapterSignature:
    """The parameters of an adapter, and how it computes the arguments of the user's kernel.

    Attributes:
        inputs: the inputs in order: a position for each memory, a name for each number. The memories that the kernel
            writes come first.
        results: positions of the memories that the kernel writes, those that are inputs first.
        outputs: names of these memories.
        constants: the values that are compiled into the kernel, by name.
        autotuned: names of the constants that a configuration supplies.
        aliases: positions of inputs, and the positions of the results that share their memory.
        memories: the name of each memory by position: the name of the first tensor in it.
        tensors: by the name of each tensor, the name of its memory and the index of its first element there.
        loaded: names of the tensors that are late scalars, which the adapter loads.
        casts: by the name of each number whose type differs between jax-triton and Triton, Triton's type.
    """

    inputs: tuple[int | str, ...]
    results: tuple[int, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, Any]
    autotuned: tuple[str, ...]
    aliases: Mapping[int, int]
    memories: Mapping[int, str]
    tensors: Mapping[str, tuple[str, int]]
    loaded: frozenset[str]
    casts: Mapping[str, str]

    @classmethod
    def of(cls, launch: Launch, fresh: Sequence[int], configuration: LaunchConfiguration) -> AdapterSignature:
        """Return the signature for a launch.

        Args:
            launch: the launch.
            fresh: positions of written memories that have no values before the launch, and are not passed.
            configuration: one of the launch's configurations.
        """
        views = dict(zip(launch.tensors, launch.views, strict=True))
        memories = {position: name for name, (position, _) in reversed(_memory_offsets(views).items())}
        constant = {p.name for p in jit_function(launch.kernel).params if p.is_constexpr}
        # An input that a result aliases has the same index as the result: after timing a configuration, jaxlib's
        # autotuner restores only such inputs.
        kept = [position for position in launch.written if position not in fresh]
        results = (*kept, *(position for position in launch.written if position in fresh))
        inputs: list[int | str] = [*kept]
        constants: dict[str, Any] = {}
        for name in jit_function(launch.kernel).arg_names:
            if name in views:
                position = views[name].memory
                if position not in results and memories[position] == name:
                    inputs.append(position)
            elif name in configuration.constants:
                continue
            elif name in constant or launch.values[name] is None or isinstance(launch.values[name], bool | float):
                constants[name] = launch.values[name]
            else:
                inputs.append(name)
        # Triton passes a float as float32; jax-triton passes it as float64, or as an integer if it is 1. Both make an
        # integer 1 a constant, unless the kernel asks them not to.
        casts = {
            p.name: LANGUAGE_TYPES[scalar_type(p, launch.values[p.name])]
            for p in jit_function(launch.kernel).params
            if p.name in {*constants, *inputs} - constant - configuration.constants.keys()
            and isinstance(value := launch.values[p.name], bool | int | float)
            and (p.annotation_type or p.do_not_specialize or not isinstance(value, int) or isinstance(value, bool))
        }
        return cls(
            tuple(inputs),
            results,
            tuple(memories[i] for i in results),
            constants,
            tuple(configuration.constants),
            {i: i for i in range(len(kept))},
            memories,
            {name: (memories[position], start) for name, (position, start) in _memory_offsets(views).items()},
            launch.numbers,
            casts,
        )

    @property
    def numbers(self) -> list[str]:
        """Return the names of the inputs that are numbers."""
        return [x for x in self.inputs if isinstance(x, str)]

    def source(self, name: str) -> str:
        """Return the source of a kernel with these parameters that calls the user's kernel as ``_kernel``."""
        inputs = [self.memories[x] if isinstance(x, int) else x for x in self.inputs]
        # An input and its result are the same memory. If jax-triton passes both, the kernel gets the result.
        given, outputs = inputs, [x for x in self.outputs if x not in inputs]
        if passes_aliases_twice():
            given, outputs = [f"{x}__before" if x in self.outputs else x for x in inputs], list(self.outputs)
        constants = [*self.constants, *self.autotuned]
        parameters = [*given, *outputs, *(f"{x}: tl.constexpr" for x in with_adapter_names(dict.fromkeys(constants)))]
        names = dict.fromkeys([*self.tensors, *self.numbers, *constants])
        call = ", ".join(f"{x}={self._argument(x)}" for x in names)
        return f"def {name}({', '.join(parameters)}):\n    _kernel({call})\n"

    def _argument(self, name: str) -> str:
        """Return the expression for an argument of the user's kernel."""
        if name in self.tensors:
            memory, start = self.tensors[name]
            pointer = f"{memory} + {start}" if start else memory
            return f"tl.load({pointer})" if name in self.loaded else pointer
        (parameter,) = with_adapter_names({name: None})
        if name not in self.casts:
            return parameter
        if name in self.constants and self.casts[name] == "float64":  # `tl.cast` would first make it a float32
            return f"tl.full([], {parameter}, tl.float64)"
        return f"tl.cast({parameter}, tl.{self.casts[name]})"


def _memory_offsets(views: Mapping[str, MemoryView]) -> dict[str, tuple[int, int]]:
    return {name: (view.memory, view.offset) for name, view in views.items()}


def with_adapter_names(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return constants by name, renamed where jax-triton would treat the name as an option of the launch."""
    return {f"{name}{_SUFFIX}" if name in OPTIONS else name: value for name, value in constants.items()}


def with_kernel_names(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return constants with the names of the user's kernel added, where :func:`with_adapter_names` changed a name."""
    own = {name.removesuffix(_SUFFIX): value for name, value in constants.items() if name.endswith(_SUFFIX)}
    return {**constants, **own}


_SUFFIX = "__of_kernel"


def adapter_kernel(function: Any, parameters: AdapterSignature) -> Any:
    """Return a kernel with the signature `parameters` and the name of `function` that calls `function`.

    jax-triton compiles a kernel object once. Launches with the same adapter get the same object, so that a second
    program does not compile the user's kernel again.
    """
    return _made(function, function.cache_key, _global_values(function), parameters.source(function.__name__))


def _global_values(function: Any) -> tuple[tuple[str, str], ...]:
    """Return the names and values of the global variables that a kernel and the functions that it calls use.

    They are part of the compiled code. Triton lists them when it computes the function's `cache_key`; Triton 3.6 leaves
    out those of called functions the first time.
    """
    used = [entry for each in _with_called(function) for entry in each.used_global_vals.items()]
    return tuple((name, repr(scope.get(name))) for (name, _), (_, scope) in used)


def _with_called(function: Any) -> list[Any]:
    """Return a kernel and the jitted functions that it calls, directly or indirectly, found by names in their code."""
    found = [function]
    for each in found:  # the body appends the functions that `each` calls
        names, scope = each.fn.__code__.co_names, inspect.getclosurevars(each.fn)
        values = [*scope.globals.values(), *scope.nonlocals.values()]
        modules: list[types.ModuleType] = []
        for value in values:  # the body appends the attributes of a module that the code of `each` names
            if isinstance(value, types.ModuleType) and not any(value is module for module in modules):
                modules.append(value)
                values += [vars(value)[name] for name in names if name in vars(value)]
        found += [
            value for value in values if _is_triton_function(value) and not any(value is other for other in found)
        ]
    return found


def _is_triton_function(value: Any) -> bool:
    """Return whether a value is a result of `triton.jit`."""
    return isinstance(getattr(value, "fn", None), types.FunctionType) and hasattr(value, "used_global_vals")


@functools.lru_cache(maxsize=256)
def _made(function: Any, key: str, global_values: tuple[tuple[str, str], ...], source: str) -> Any:
    """Return the kernel of :func:`adapter_kernel`. The cache compares jitted functions by identity.

    Args:
        function: the user's kernel.
        key, global_values: values that differ if the code of `function` differs, so that new code gets a new kernel.
        source: the source of the adapter.
    """
    del key, global_values
    import triton
    import triton.language as tl

    name = function.__name__
    # Triton reads the source of a kernel with `inspect`, which finds code without a file in `linecache`.
    file = f"<launch of {name} {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = types.ModuleType(f"{function.fn.__module__}.launch")
    module.__dict__.update(_kernel=function, tl=tl)
    exec(compile(source, file, "exec"), module.__dict__)
    return triton.jit(module.__dict__[name])  # pyright: ignore[reportAttributeAccessIssue]


def autotuned(kernel: Any, configurations: Sequence[LaunchConfiguration], numbers: Sequence[str]) -> Any:
    """Return an autotuned kernel: jax-triton times all configurations, once for each set of `numbers`."""
    import triton

    configs = [triton.Config(with_adapter_names(c.constants), **c.options) for c in configurations]  # pyright: ignore[reportAttributeAccessIssue]
    return triton.autotune(configs=configs, key=list(numbers))(kernel)  # pyright: ignore[reportAttributeAccessIssue]
