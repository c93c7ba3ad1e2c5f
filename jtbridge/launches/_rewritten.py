"""A kernel whose parameters are its inputs, then its results, then its constants, as jax-triton passes them."""

from __future__ import annotations

import dataclasses
import hashlib
import linecache
import types
from collections.abc import Mapping, Sequence
from typing import Any

from jtbridge._triton import LANGUAGE_TYPES, jit_function, names_aliases_twice, number_type

from ._launch import OPTIONS, Configuration, Launch
from ._memory import Place


@dataclasses.dataclass(frozen=True)
class Parameters:
    """In what order a kernel is given what.

    Attributes:
        inputs: positions of memories and names of numbers.
        outputs: names of the memories it writes.
        constants: the values that are part of the code.
        tuned: names of the constants that a configuration gives.
        aliases: positions of inputs, and of the results that start as them.
        memories: the names of all memories by position, each that of the first tensor in it.
        tensors: for the name of each tensor that of its memory, and the element that it begins with.
        loaded: those of them that the kernel takes as numbers.
        casts: the numbers that the kernel takes as of a type that jax-triton would not pass, and that type.
    """

    inputs: tuple[int | str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, Any]
    tuned: tuple[str, ...]
    aliases: Mapping[int, int]
    memories: Mapping[int, str]
    tensors: Mapping[str, tuple[str, int]]
    loaded: frozenset[str]
    casts: Mapping[str, str]

    @classmethod
    def of(cls, launch: Launch, fresh: Sequence[int], configuration: Configuration) -> Parameters:
        """Those of a launch, some of whose memories need not be passed."""
        place = dict(zip(launch.tensors, launch.places, strict=True))
        memories = {position: name for name, (position, _) in reversed(_starts(place).items())}
        constant = {p.name for p in jit_function(launch.kernel).params if p.is_constexpr}
        inputs: list[int | str] = []
        constants: dict[str, Any] = {}
        aliases: dict[int, int] = {}
        for name in jit_function(launch.kernel).arg_names:
            if name in place:
                position = place[name].memory
                if position in fresh or memories[position] != name:
                    continue
                if position in launch.written:
                    aliases[len(inputs)] = launch.written.index(position)
                inputs.append(position)
            elif name in configuration.constants:
                continue
            elif name in constant or launch.values[name] is None or isinstance(launch.values[name], bool | float):
                constants[name] = launch.values[name]
            else:
                inputs.append(name)
        # A float Triton passes as float32, and jax-triton as float64, or as an integer if it is 1; an integer that is 1
        # is part of the code, but where the kernel says that it is not.
        casts = {
            p.name: LANGUAGE_TYPES[number_type(p, launch.values[p.name])]
            for p in jit_function(launch.kernel).params
            if p.name in {*constants, *inputs} - constant - configuration.constants.keys()
            and isinstance(value := launch.values[p.name], bool | int | float)
            and (p.annotation_type or p.do_not_specialize or not isinstance(value, int) or isinstance(value, bool))
        }
        return cls(
            tuple(inputs),
            tuple(memories[i] for i in launch.written),
            constants,
            tuple(configuration.constants),
            aliases,
            memories,
            {name: (memories[position], start) for name, (position, start) in _starts(place).items()},
            launch.numbers,
            casts,
        )

    @property
    def numbers(self) -> list[str]:
        """The inputs that are no tensors."""
        return [x for x in self.inputs if isinstance(x, str)]

    def source(self, name: str) -> str:
        """A kernel that takes these parameters and calls ``_kernel``."""
        inputs = [self.memories[x] if isinstance(x, int) else x for x in self.inputs]
        # An input that is a result too is the same memory: the result is what the kernel gets, if it is there again.
        given, outputs = inputs, [x for x in self.outputs if x not in inputs]
        if names_aliases_twice():
            given, outputs = [f"{x}__before" if x in self.outputs else x for x in inputs], list(self.outputs)
        constants = [*self.constants, *self.tuned]
        parameters = [*given, *outputs, *(f"{x}: tl.constexpr" for x in spelled(dict.fromkeys(constants)))]
        names = dict.fromkeys([*self.tensors, *self.numbers, *constants])
        call = ", ".join(f"{x}={self._passed(x)}" for x in names)
        return f"def {name}({', '.join(parameters)}):\n    _kernel({call})\n"

    def _passed(self, name: str) -> str:
        if name in self.tensors:
            memory, start = self.tensors[name]
            pointer = f"{memory} + {start}" if start else memory
            return f"tl.load({pointer})" if name in self.loaded else pointer
        (passed,) = spelled({name: None})
        return f"tl.cast({passed}, tl.{self.casts[name]})" if name in self.casts else passed


def _starts(places: Mapping[str, Place]) -> dict[str, tuple[int, int]]:
    return {name: (place.memory, place.offset) for name, place in places.items()}


def spelled(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Constants by other names where jax-triton would take them for options of the launch."""
    return {f"{name}{_OWN}" if name in OPTIONS else name: value for name, value in constants.items()}


def named(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Constants by the names that the user's kernel has for them."""
    own = {name.removesuffix(_OWN): value for name, value in constants.items() if name.endswith(_OWN)}
    return {**constants, **own}


_OWN = "__of_kernel"


def rewritten(function: Any, parameters: Parameters) -> Any:
    """A kernel that calls `function` with what it is given in the order of `parameters`; of the same name."""
    import triton
    import triton.language as tl

    name = function.__name__
    source = parameters.source(name)
    # Triton reads the source of a kernel by Python's own means, which look here for code that is in no file.
    file = f"<launch of {name} {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = types.ModuleType(f"{function.fn.__module__}.launch")
    module.__dict__.update(_kernel=function, tl=tl)
    exec(compile(source, file, "exec"), module.__dict__)
    return triton.jit(module.__dict__[name])


def tuned(kernel: Any, configurations: Sequence[Configuration], numbers: Sequence[str]) -> Any:
    """A kernel of which jax-triton tries all configurations, once for each set of numbers."""
    import triton

    configs = [
        triton.Config(spelled(c.constants), num_warps=c.num_warps, num_stages=c.num_stages, num_ctas=c.num_ctas)
        for c in configurations
    ]
    return triton.autotune(configs=configs, key=list(numbers))(kernel)
