"""The record of one launch: the kernel, its grid and all arguments that are not tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jtbridge.core.array_types import SYMBOLIC_NUMBERS
from jtbridge.core.messages import kind_of
from jtbridge.errors import LaunchError
from jtbridge.triton._ir import TRITON_TYPES, jit_function

from ._late_scalars import LateScalar, SymbolicScalarError
from ._memory import MemoryView

# Options of a launch, which are not parameters of the kernel.
OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas"})
_FOR_SPEED = frozenset({"maxnreg", "launch_pdl", "waves_per_eu", "matrix_instr_nonkdim", "kpack"})
_IGNORED = frozenset({"warmup", "debug", "launch_cooperative_grid"}) | _FOR_SPEED


@dataclasses.dataclass(frozen=True)
class LaunchConfiguration:
    """Constants and options with which a kernel is compiled. An autotuned kernel has several."""

    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1

    @property
    def options(self) -> dict[str, int]:
        """Return the options of the launch by name."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "num_ctas": self.num_ctas}


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """The launch ``kernel[grid](...)`` without its tensors.

    Attributes:
        kernel: the user's kernel: ``triton.jit``, possibly under ``triton.heuristics`` and ``triton.autotune``.
        grid: one to three numbers, or a function of the kernel's arguments and constants that returns them.
        tensors: the names of the parameters that are tensors.
        numbers: the names among `tensors` that are late scalars: the kernel gets the number that the tensor holds.
        values: the other arguments by name: numbers and constants.
        options: `num_warps`, `num_stages` and `num_ctas` that the launch asks for.
        views: for each tensor, its memory and its place in that memory.
        written: the positions of the memories that the kernel writes.
        descriptors: whether the kernel makes tensor descriptors.
    """

    kernel: Any
    grid: Any
    tensors: tuple[str, ...]
    values: Mapping[str, Any]
    options: Mapping[str, int]
    numbers: frozenset[str] = frozenset()
    views: tuple[MemoryView, ...] = ()
    written: tuple[int, ...] = ()
    descriptors: bool = False

    def __deepcopy__(self, memo: Any) -> Launch:
        return self  # a copy of a graph performs the same launch

    @property
    def name(self) -> str:
        """Return the name of the kernel's Python function."""
        return jit_function(self.kernel).__name__

    def arguments(self, memories: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the kernel's arguments by name, with a tensor for each late scalar."""
        tensors = [view.tensor(memories) for view in self.views]
        return {**dict(zip(self.tensors, tensors, strict=True)), **self.values}

    def evaluated_arguments(self, memories: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the kernel's arguments by name, with the value of each late scalar. `memories` are real tensors."""
        return {name: x.item() if name in self.numbers else x for name, x in self.arguments(memories).items()}

    def configurations(self, arguments: Mapping[str, Any]) -> list[LaunchConfiguration]:
        """Return the configurations that apply to the arguments. Only the shapes and dtypes of tensors are read."""
        return _configurations(self.kernel, arguments, LaunchConfiguration({}, **self.options))

    def grid_of(self, configuration: LaunchConfiguration, arguments: Mapping[str, Any]) -> tuple[int, int, int]:
        """Return the number of programs in each of three dimensions."""
        grid: Any = self.grid
        if callable(grid):
            grid = grid({**arguments, **configuration.constants})
        sizes = (grid,) if isinstance(grid, int) else tuple(int(size) for size in grid)
        return (*sizes, 1, 1)[:3]  # type: ignore[return-value]


def bind_launch(
    kernel: Any, grid: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Launch, list[torch.Tensor]]:
    """Return the record of ``kernel[grid](*args, **kwargs)``, and its tensors.

    Raises:
        LaunchError: an argument cannot be part of a JAX program.
    """
    function = jit_function(kernel)
    named = _arguments_by_name(kernel, args, kwargs)
    options = {name: int(kwargs[name]) for name in OPTIONS & kwargs.keys()}
    numbers = {}
    for name, value in named.items():
        if isinstance(value, LateScalar):
            value.is_kernel_argument = True
            numbers[name] = value.tensor
    tensors = {name: value for name, value in {**named, **numbers}.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        if tensor.dtype not in TRITON_TYPES:
            raise LaunchError(
                f"Kernel `{function.__name__}` was given a tensor of {tensor.dtype} for `{name}`, but Triton does not "
                "have this dtype. Pass complex tensors as `torch.view_as_real(x)`."
            )
    values = {name: _checked_value(function, name, value) for name, value in named.items() if name not in tensors}
    return Launch(kernel, grid, tuple(tensors), values, options, frozenset(numbers)), list(tensors.values())


def _arguments_by_name(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a launch by name, with defaults, but without the arguments that decorators supply.

    Raises:
        LaunchError: the arguments do not fit the kernel, or the launch is cooperative.
    """
    function = jit_function(kernel)
    named = dict(zip(function.arg_names, args, strict=False))
    # A parameter of the kernel may have the name of an option; then the argument is both.
    own = set(function.arg_names)
    named |= {name: value for name, value in kwargs.items() if name in own or name not in OPTIONS | _IGNORED}
    if kwargs.get("launch_cooperative_grid"):
        raise LaunchError(
            f"Kernel `{function.__name__}` is launched with `launch_cooperative_grid`, so its programs wait for each "
            "other. In a JAX program they may run one after another, which would deadlock. Split the kernel in two."
        )
    unknown = [name for name in named if name not in function.arg_names]
    if unknown or len(args) > len(function.arg_names):
        raise LaunchError(
            f"Kernel `{function.__name__}` was launched with {', '.join(unknown) or f'{len(args)} arguments'}, which "
            f"it does not take. Its parameters are {', '.join(function.arg_names)}; options of a launch in a JAX "
            f"program are {', '.join(sorted(OPTIONS))}."
        )
    for parameter in function.params:
        if parameter.name not in named and parameter.has_default:
            named[parameter.name] = parameter.default
    missing = [name for name in function.arg_names if name not in named and name not in _decorator_arguments(kernel)]
    if missing:
        raise LaunchError(
            f"Kernel `{function.__name__}` was launched without its parameters {', '.join(missing)}. Pass them."
        )
    return named


def _decorator_arguments(kernel: Any) -> set[str]:
    """Return the names of the arguments that ``triton.autotune`` and ``triton.heuristics`` supply."""
    found: set[str] = set()
    while kernel is not jit_function(kernel):
        found |= {name for config in getattr(kernel, "configs", ()) for name in (*config.kwargs, *OPTIONS)}
        found |= set(getattr(kernel, "values", ()))
        kernel = kernel.fn
    return found


def _checked_value(function: Any, name: str, value: Any) -> Any:
    value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
    if isinstance(value, SYMBOLIC_NUMBERS):
        raise SymbolicScalarError(
            f"Kernel `{function.__name__}` was given a size that depends on data for `{name}`. Pass a fixed number."
        )
    parameter = next(p for p in function.params if p.name == name)
    if parameter.is_constexpr or value is None or isinstance(value, bool | int | float):
        return value
    raise LaunchError(
        f"Kernel `{function.__name__}` was given {kind_of(value)} for `{name}`. In a JAX program a kernel "
        "takes tensors, numbers and None; declare other arguments as `tl.constexpr`."
    )


def _configurations(kernel: Any, named: Mapping[str, Any], given: LaunchConfiguration) -> list[LaunchConfiguration]:
    if hasattr(kernel, "configs"):  # triton.autotune
        _refuse_hooks(kernel)
        found = []
        for config in _pruned(kernel, named):
            options = {name: getattr(config, name) for name in OPTIONS}
            parameters = jit_function(kernel).arg_names
            own = {name: value for name, value in options.items() if name in parameters}
            own |= {name: x for name, x in config.kwargs.items() if name in parameters or name not in _FOR_SPEED}
            chosen = LaunchConfiguration({**given.constants, **own}, **options)
            found += _configurations(kernel.fn, {**named, **own}, chosen)
        return found
    if hasattr(kernel, "values"):  # triton.heuristics
        guessed = dict(given.constants)
        for name, heuristic in kernel.values.items():
            guessed[name] = heuristic({**named, **guessed})
        return _configurations(kernel.fn, {**named, **guessed}, dataclasses.replace(given, constants=guessed))
    return [given]


def _pruned(kernel: Any, named: Mapping[str, Any]) -> list[Any]:
    """Return the configurations that remain after an autotuned kernel's `early_config_prune` and `perf_model`."""
    tuner = copy.copy(kernel)
    tuner.nargs, tuner.perf_model = dict(named), None
    tuner.configs = tuner.prune_configs(dict(named))
    tuner.early_config_prune, tuner.perf_model = None, kernel.perf_model
    return tuner.prune_configs({})  # `perf_model` gets `named` from `nargs`; as an argument it would get it twice


def _refuse_hooks(tuner: Any) -> None:
    hooks = [config for config in tuner.configs if config.pre_hook is not None]
    if hooks or tuner.user_defined_pre_hook or tuner.user_defined_post_hook:
        raise LaunchError(
            f"Kernel `{jit_function(tuner).__name__}` is autotuned with hooks, which are Python code that runs around "
            "each launch. A compiled JAX program cannot run them. Remove the hooks."
        )
