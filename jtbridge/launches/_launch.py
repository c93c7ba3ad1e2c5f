"""What one launch is besides its tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jtbridge._triton import TRITON_TYPES, jit_function
from jtbridge.errors import LaunchError

from ._deferred import DeferredNumber, SymbolicNumberError
from ._memory import Place

# Arguments of a launch that are not the kernel's own.
OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas"})
_FOR_SPEED = frozenset({"maxnreg", "launch_pdl", "waves_per_eu", "matrix_instr_nonkdim", "kpack"})
_IGNORED = frozenset({"warmup", "debug", "launch_cooperative_grid"}) | _FOR_SPEED


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way to compile a kernel: of an autotuned one there are several."""

    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """``kernel[grid](...)`` without its tensors.

    Attributes:
        kernel: as the user has it: ``triton.jit``, with ``triton.heuristics`` and ``triton.autotune`` over it.
        grid: one to three numbers, or a function of the kernel's arguments and constants that gives them.
        tensors: the names of the parameters that are tensors.
        numbers: those of them that the kernel takes as numbers, read from a tensor of one element.
        values: the other parameters by name: numbers, and constants.
        options: warps and stages that the launch itself asks for.
        places: where each of the tensors lies, in the memories that are passed on.
        written: which of the memories the kernel writes, by position.
    """

    kernel: Any
    grid: Any
    tensors: tuple[str, ...]
    values: Mapping[str, Any]
    options: Mapping[str, int]
    numbers: frozenset[str] = frozenset()
    places: tuple[Place, ...] = ()
    written: tuple[int, ...] = ()

    def __deepcopy__(self, memo: Any) -> Launch:
        return self  # a copied graph launches the same

    @property
    def name(self) -> str:
        """The name of the kernel's Python function."""
        return jit_function(self.kernel).__name__

    def named(self, memories: Sequence[torch.Tensor]) -> dict[str, Any]:
        """What the kernel is launched with, by name."""
        tensors = [place.tensor(memories) for place in self.places]
        return {**dict(zip(self.tensors, tensors, strict=True)), **self.values}

    def arguments(self, memories: Sequence[torch.Tensor]) -> dict[str, Any]:
        """What the kernel is called with, by name: real tensors, and the numbers read from theirs."""
        return {name: x.item() if name in self.numbers else x for name, x in self.named(memories).items()}

    def configurations(self, named: Mapping[str, Any]) -> list[Configuration]:
        """The ways to compile it that are left for these arguments; of tensors only shapes and dtypes count."""
        return _configurations(self.kernel, named, Configuration({}, **self.options))

    def grid_of(self, configuration: Configuration, named: Mapping[str, Any]) -> tuple[int, int, int]:
        """How many programs run, in three dimensions."""
        grid: Any = self.grid
        if callable(grid):
            grid = grid({**named, **configuration.constants})
        sizes = (grid,) if isinstance(grid, int) else tuple(int(size) for size in grid)
        return (*sizes, 1, 1)[:3]  # type: ignore[return-value]


def bound(kernel: Any, grid: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Launch, list[torch.Tensor]]:
    """The launch that ``kernel[grid](*args, **kwargs)`` is, and its tensors.

    Raises:
        LaunchError: an argument is of a kind that cannot be part of a JAX program.
    """
    function = jit_function(kernel)
    named = dict(zip(function.arg_names, args, strict=False))
    options = {name: int(kwargs[name]) for name in OPTIONS & kwargs.keys()}
    own = set(function.arg_names)  # which may be called as an option is, and then are what it is
    named |= {name: value for name, value in kwargs.items() if name in own or name not in OPTIONS | _IGNORED}
    if kwargs.get("launch_cooperative_grid"):
        raise LaunchError(
            f"Kernel `{function.__name__}` is launched with `launch_cooperative_grid`: its programs wait for each "
            "other. From a JAX program they may run one after another, and it would wait for ever."
        )
    unknown = [name for name in named if name not in function.arg_names]
    if unknown or len(args) > len(function.arg_names):
        raise LaunchError(
            f"Kernel `{function.__name__}` was launched with {', '.join(unknown) or f'{len(args)} arguments'}, which "
            f"it does not take. Its parameters: {', '.join(function.arg_names)}; options of launches in a JAX program: "
            f"{', '.join(sorted(OPTIONS))}."
        )
    for parameter in function.params:
        if parameter.name not in named and parameter.has_default:
            named[parameter.name] = parameter.default
    missing = [name for name in function.arg_names if name not in named and name not in _given_by_tuners(kernel)]
    if missing:
        raise LaunchError(f"Kernel `{function.__name__}` was launched without {', '.join(missing)}, which it takes.")
    numbers = {}
    for name, value in named.items():
        if isinstance(value, DeferredNumber):
            value.taken = True
            numbers[name] = value.tensor
    tensors = {name: value for name, value in {**named, **numbers}.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        if tensor.dtype not in TRITON_TYPES:
            raise LaunchError(
                f"Kernel `{function.__name__}` was given a tensor of {tensor.dtype} for `{name}`, which Triton does "
                "not have. Complex numbers are passed as `torch.view_as_real` has them."
            )
    values = {name: _plain(function, name, value) for name, value in named.items() if name not in tensors}
    return Launch(kernel, grid, tuple(tensors), values, options, frozenset(numbers)), list(tensors.values())


def _given_by_tuners(kernel: Any) -> set[str]:
    found: set[str] = set()
    while kernel is not jit_function(kernel):
        found |= {name for config in getattr(kernel, "configs", ()) for name in (*config.kwargs, *OPTIONS)}
        found |= set(getattr(kernel, "values", ()))
        kernel = kernel.fn
    return found


def _plain(function: Any, name: str, value: Any) -> Any:
    value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise SymbolicNumberError(
            f"Kernel `{function.__name__}` was given a symbolic size for `{name}`: give it a fixed one."
        )
    parameter = next(p for p in function.params if p.name == name)
    if parameter.is_constexpr or value is None or isinstance(value, bool | int | float):
        return value
    raise LaunchError(
        f"Kernel `{function.__name__}` was given {type(value).__name__} for `{name}`. Tensors, numbers and None can be "
        "passed to a kernel from a JAX program, and constants as `tl.constexpr`."
    )


def _configurations(kernel: Any, named: Mapping[str, Any], given: Configuration) -> list[Configuration]:
    if hasattr(kernel, "configs"):  # triton.autotune
        _refuse_hooks(kernel)
        found = []
        for config in _pruned(kernel, named):
            options = {name: getattr(config, name) for name in OPTIONS}
            parameters = jit_function(kernel).arg_names
            own = {name: value for name, value in options.items() if name in parameters}
            own |= {name: x for name, x in config.kwargs.items() if name in parameters or name not in _FOR_SPEED}
            chosen = Configuration({**given.constants, **own}, **options)
            found += _configurations(kernel.fn, {**named, **own}, chosen)
        return found
    if hasattr(kernel, "values"):  # triton.heuristics
        guessed = dict(given.constants)
        for name, heuristic in kernel.values.items():
            guessed[name] = heuristic({**named, **guessed})
        return _configurations(kernel.fn, {**named, **guessed}, dataclasses.replace(given, constants=guessed))
    return [given]


def _pruned(kernel: Any, named: Mapping[str, Any]) -> list[Any]:
    """The configurations that an autotuned kernel's own functions leave."""
    tuner = copy.copy(kernel)
    tuner.nargs, tuner.perf_model = dict(named), None
    tuner.configs = tuner.prune_configs(dict(named))
    tuner.early_config_prune, tuner.perf_model = None, kernel.perf_model
    return tuner.prune_configs({})  # a model of the time takes each argument once


def _refuse_hooks(tuner: Any) -> None:
    hooks = [config for config in tuner.configs if config.pre_hook is not None]
    if hooks or tuner.user_defined_pre_hook or tuner.user_defined_post_hook:
        raise LaunchError(
            f"Kernel `{jit_function(tuner).__name__}` is autotuned with hooks, Python that runs around each launch. In "
            "a JAX program there is no Python left to run: take the hooks out."
        )
