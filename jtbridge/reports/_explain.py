"""Report on the backend that a function gets, and why: :func:`jtbridge.explain`."""

from __future__ import annotations

import collections
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import subjaxprs
from torch import fx

from jtbridge._backends import choose_backend, may_use_kernels, translates, unsupported_reasons
from jtbridge.calls._wrap import Wrapped, as_wrapped
from jtbridge.calls.eager import unshareable_reason
from jtbridge.capture import Split, Trial, aten_graph, draws, split_or_reason
from jtbridge.core.array_types import ArrayType
from jtbridge.core.dtypes import torch_dtype
from jtbridge.core.functions import TorchFunction, TracedFunction
from jtbridge.core.primitive_rules import differentiable
from jtbridge.core.pytree import in_order
from jtbridge.core.runner import describe_arguments
from jtbridge.errors import TranslationError
from jtbridge.kernels import _chip
from jtbridge.kernels._primitive import KernelPrimitive
from jtbridge.kernels._proofs import proven
from jtbridge.transforms import Vjp
from jtbridge.translate import OperatorCounts, choose_runner, island_of, islands_in, translate, untranslatable_reason
from jtbridge.triton import unsupported_reason as triton_unsupported_reason
from jtbridge.triton.launches import Launch

from ._table import as_table

_DTYPE_CHANGES = frozenset({torch.ops.aten._to_copy.default})


@dataclasses.dataclass(frozen=True)
class IslandReport:
    """An operator that torch runs inside the translated program, or could: see ``islands=`` of :func:`jtbridge.wrap`.

    Attributes:
        operator: the name of the operator; for a region, the operator whose result depends on data, and the number of
            other operators.
        operators: the names of all operators of the island.
        count: how often it is in the program, with arguments of the same types.
        gradient: whether it is in the program of the gradient alone.
        inputs, results: the types of the arrays that cross between XLA and torch, such as ``"float32[2, 3]"``.
        bytes: the size of these arrays, for one call.
        reason: why torch runs it, and how to have it translated; or why XLA runs it.
        tuned: whether torch and XLA were measured on this machine: see ``tune=`` of :func:`jtbridge.config`.
    """

    operator: str
    operators: tuple[str, ...]
    count: int
    gradient: bool
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    bytes: int
    reason: str
    tuned: bool = False

    def __str__(self) -> str:
        types = f"({', '.join(self.inputs)}) -> ({', '.join(self.results)})"
        times = f" x {self.count}" if self.count > 1 else ""
        where = " in the gradient" if self.gradient else ""
        return f"{self.operator}{times}{where} {types}, {self.bytes} bytes: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Report of :func:`explain`. Printing it gives text.

    Attributes:
        function: the name of the function, with its arguments' dtypes and shapes.
        eager: how an eager call runs: by torch itself, or by the program of a backend.
        backend: the backend inside ``jit`` and other traced programs.
        gradient: the backend of the gradient; None if there is nothing to differentiate, or effects are ordered.
        reasons: for every backend that ``"auto"`` prefers to this one, why it is not used.
        trials: the strategies tried to find the result types, in order, each with the reason of its failure; the last
            one succeeded.
        graph_trials: the attempts to trace the forward graph, each with the reason for the next one; empty if there is
            no graph.
        operators: how often the forward graph runs each operator, without operators on constants, which are computed
            once; None if there is no graph, because torch cannot trace the function.
        decomposed: the operators that run as torch's decomposition into other operators.
        missing: operators that prevent a translation, because they have neither a lowering nor a decomposition;
            operators inside decompositions are included.
        islands: the operators that torch runs inside the translated program and inside that of the gradient, each with
            sizes and the reason.
        left_to_xla: the operators that torch could run in these programs, but that XLA was measured to run faster on
            this machine.
        random: operators that draw random numbers.
        mutated: names of the arguments that the function writes to (it writes to copies).
        casts: how often each dtype conversion occurs, such as ``"float32 -> float64"``, on entry, inside and on exit.
        kernels: how often each Triton kernel is in the program if it is lowered for a GPU: the kernels that the
            function launches, and the kernels of `jtbridge.kernels`. Chains of operators are fused for a kernel if
            this machine has a GPU, or with ``backend="triton"``. Empty if Triton is not installed, the function
            cannot be translated, or a backend other than "auto" and "triton" was asked for. On a GPU, "auto" has only
            the kernels that are proven there: see :func:`jtbridge.prove`.
        constants: number and bytes of the closed-over tensors that became arrays.
        seconds: time to trace the function.
    """

    function: str
    eager: str
    backend: str
    gradient: str | None
    reasons: dict[str, str]
    trials: tuple[Trial, ...]
    graph_trials: tuple[Trial, ...]
    operators: dict[str, int] | None
    decomposed: tuple[str, ...]
    missing: tuple[str, ...]
    islands: tuple[IslandReport, ...]
    left_to_xla: tuple[IslandReport, ...]
    random: tuple[str, ...]
    mutated: tuple[str, ...]
    casts: dict[str, int]
    kernels: dict[str, int]
    constants: tuple[int, int]
    seconds: float

    def rows(self) -> list[tuple[str, str]]:
        """Return the report as pairs of heading and text."""
        count, size = self.constants
        return [
            ("function", self.function),
            ("eager call", self.eager),
            ("inside jit", self.backend),
            *((f"not {name}", reason) for name, reason in self.reasons.items()),
            ("gradient", self.gradient or "nothing to differentiate"),
            *(("traced by", str(trial)) for trial in self.trials),
            *(("graph by", str(trial)) for trial in (self.graph_trials if len(self.graph_trials) > 1 else ())),
            ("operators", "no graph" if self.operators is None else _counts_text(self.operators)),
            *([] if self.operators is None else [("decomposed", ", ".join(self.decomposed) or "none")]),
            *([] if self.operators is None else [("no lowering", ", ".join(self.missing) or "none")]),
            *(("islands", str(island)) for island in self.islands),
            *(("left to XLA", str(operator)) for operator in self.left_to_xla),
            ("random", ", ".join(self.random) or "none"),
            ("mutated", ", ".join(self.mutated) or "none"),
            ("dtype changes", _counts_text(self.casts)),
            ("GPU kernels", _counts_text(self.kernels)),
            ("constants", f"{count} arrays, {size / 2**20:.1f} MiB" if count else "none"),
            ("captured in", f"{self.seconds:.2f} s"),
        ]

    def __str__(self) -> str:
        return as_table(self.rows())

    __repr__ = __str__

    def show(self) -> None:
        """Print the report: as a table by `rich` if that is installed and stdout is a terminal, else as plain text."""
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            sys.stdout.write(f"{self}\n")
            return
        if not sys.stdout.isatty():
            sys.stdout.write(f"{self}\n")
            return
        table = Table(show_header=False)
        for heading, text in self.rows():
            table.add_row(f"[bold]{heading}[/bold]", text)
        Console().print(table)


def explain(fn: Any, *args: Any, **kwargs: Any) -> Explanation:
    """Report which backend would run a function for these arguments, and why the backends before it would not.

    Args:
        fn: a wrapped function, or a torch function.
        args, kwargs: the arguments of a call, ``rng=`` included; an array may be a ``jax.ShapeDtypeStruct``. Nothing is
            computed, unless torch cannot trace the function: then the function may run on example arguments, the first
            of which are zeros.

    Returns:
        A report to print; ``.show()`` prints it as a table in a terminal where `rich` is installed.

    Raises:
        JtbridgeError: any error that a call would raise before it runs.

    Example:
        >>> import jax.numpy as jnp, jtbridge, torch
        >>> report = jtbridge.explain(torch.sin, jnp.ones(3))
        >>> report.backend, report.operators
        ('xla', {'aten.sin.default': 1})
    """
    wrapped = as_wrapped(fn)
    args, kwargs = jax.tree.map(_example_array, in_order((args, kwargs)))
    started = time.perf_counter()
    traced, _ = wrapped.prepared(args, dict(kwargs))
    seconds = time.perf_counter() - started
    platform = jax.default_backend()
    module = _graph_if_traceable(traced)
    nodes = [] if module is None else _nodes(module)
    counts = None if module is None else OperatorCounts(module)
    reasons = unsupported_reasons(wrapped.backend, platform, traced) if not wrapped.ordered else {}
    name = (
        "io_callback, in order"
        if wrapped.ordered
        else choose_backend(wrapped.backend, platform, traced, quiet=True).name
    )
    runners = _runners(wrapped, platform, traced)
    return Explanation(
        function=f"{traced.name}({describe_arguments(traced)})",
        eager=_eager(wrapped, args, kwargs, name),
        backend=name,
        gradient=None if wrapped.ordered else _gradient_backend(wrapped, platform, traced),
        reasons=reasons,
        trials=tuple(traced.trials),
        graph_trials=() if module is None else tuple(module.meta.get("trials", ())),
        operators=None if counts is None else counts.all,
        decomposed=() if counts is None else counts.decomposed,
        missing=() if counts is None else counts.missing,
        islands=tuple(report for report, in_torch in runners if in_torch),
        left_to_xla=tuple(report for report, in_torch in runners if not in_torch),
        random=_random_operators(traced, nodes),
        mutated=tuple(traced.argument_names[i] for i in traced.traits.effects.mutated),
        casts=_casts(traced, nodes),
        kernels=_kernel_counts(traced, wrapped.backend) if may_use_kernels(wrapped.backend) else {},
        constants=(len(traced.constants), sum(t.numel() * t.element_size() for t in traced.constants)),
        seconds=seconds,
    )


def _example_array(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def _eager(wrapped: Wrapped, args: tuple, kwargs: dict[str, Any], traced: str) -> str:
    """Return how an eager call runs; if not by torch itself, with the reason."""
    if translates(wrapped.backend) and wrapped.backend != "auto" and not wrapped.ordered:
        return f"{traced}, as under jax.jit: backend={wrapped.backend!r} was asked for"
    arrays, _, _ = wrapped.flattened(args, dict(kwargs))
    reasons = [reason for reason in map(unshareable_reason, arrays) if reason is not None]
    return f"{traced}, for {reasons[0]}" if reasons else "torch itself"


def _graph_if_traceable(traced: TracedFunction) -> fx.GraphModule | None:
    """Return the forward graph, or None if torch cannot trace the function."""
    try:
        return aten_graph(traced)
    except TranslationError:
        return None


def _nodes(module: fx.GraphModule) -> list[fx.Node]:
    """Return the operator nodes of a graph."""
    return [node for node in module.graph.nodes if node.op == "call_function" and hasattr(node.target, "tags")]


def _gradient_backend(wrapped: Wrapped, platform: str, traced: TracedFunction) -> str | None:
    gradient = _gradient_function(traced)
    if gradient is None:
        return None
    backend = choose_backend(wrapped.backend, platform, gradient, quiet=True)
    refused = list(unsupported_reasons(wrapped.backend, platform, gradient).values())
    return backend.name if backend.kind == "translate" or not refused else f"{backend.name}, for {refused[-1]}"


def _gradient_function(traced: TracedFunction) -> TorchFunction | None:
    """Return the vector-Jacobian product of a function; None if there is nothing to differentiate.

    For a function with regions whose sizes depend on data, return only the backward, if it can be split off: the whole
    product has other regions.
    """
    wrt, outs = differentiable(traced.in_types[: traced.first_constant]), differentiable(traced.out_types)
    if not wrt or not outs:
        return None
    if traced.traits.has_dynamic_sizes and untranslatable_reason(traced) is None:
        found = split_or_reason(traced, wrt, outs, translated=True)
        if isinstance(found, Split):
            return found.backward
    return Vjp(traced, wrt, outs)


def _random_operators(traced: TracedFunction, nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    found = {str(node.target) for node in nodes if draws(node.target, node.args, node.kwargs)}
    if not nodes and traced.traits.effects.random_operator is not None:
        found = {traced.traits.effects.random_operator}
    return tuple(sorted(found))


def _kernel_counts(traced: TracedFunction, backend: str) -> dict[str, int]:
    """Count the Triton kernels in the translated function. On a GPU, "auto" uses only those that are proven there."""
    if triton_unsupported_reason() is not None or untranslatable_reason(traced) is not None:
        return {}
    found: collections.Counter[str] = collections.Counter()
    used = proven() if backend == "auto" and _chip.present() is not None else True
    pending = [translate(traced, kernels=used).jaxpr]
    while pending:
        jaxpr = pending.pop()
        pending += subjaxprs(jaxpr)
        for equation in jaxpr.eqns:
            kernels = [value for value in equation.params.values() if isinstance(value, KernelPrimitive | Launch)]
            found.update(kernel.name for kernel in kernels)
    return dict(found)


def _runners(wrapped: Wrapped, platform: str, traced: TracedFunction) -> list[tuple[IslandReport, bool]]:
    """Return the operators that torch runs, or that were measured and left to XLA, each with whether torch runs it.

    The operators are those of the translated function and of its gradient. Equal operators are reported once.
    """
    if traced.islands == "never" or wrapped.ordered:
        return []
    found: dict[Any, tuple[IslandReport, bool]] = {}
    gradient = _gradient_function(traced)
    for function in (traced, *([] if gradient is None else [gradient])):
        if choose_backend(wrapped.backend, platform, function, quiet=True).kind == "call":
            continue
        choices = [(fn, choose_runner(fn, lowered, platform)) for fn, lowered in islands_in(translate(function))]
        shown = [(fn, choice) for fn, choice in choices if choice.in_torch or choice.measured]
        counts = collections.Counter((_operators_and_types(fn), choice.in_torch) for fn, choice in shown)
        for fn, choice in shown:
            operators, inputs, results = key = _operators_and_types(fn)
            report = IslandReport(
                operator=island_of(fn).operator,
                operators=operators,
                count=counts[key, choice.in_torch],
                gradient=function is not traced,
                inputs=tuple(map(_type_text, inputs)),
                results=tuple(map(_type_text, results)),
                bytes=sum(math.prod(t.shape) * t.dtype.itemsize for t in (*inputs, *results)),
                reason=choice.reason or "",
                tuned=choice.measured,
            )
            found.setdefault((key, choice.in_torch), (report, choice.in_torch))
    return list(found.values())


def _operators_and_types(fn: TorchFunction) -> tuple[tuple[str, ...], tuple[ArrayType, ...], tuple[ArrayType, ...]]:
    return tuple(map(str, island_of(fn).operators)), fn.in_types, fn.out_types


def _type_text(type_: ArrayType) -> str:
    return f"{type_.dtype}{list(type_.shape)}"


def _casts(traced: TracedFunction, nodes: Sequence[fx.Node]) -> dict[str, int]:
    """Count the dtype conversions of arguments, between operators, and of results; without a graph, of arguments."""
    changes: collections.Counter[str] = collections.Counter()
    if not nodes:
        for type_, dtype in zip(traced.in_types, traced.in_torch_dtypes, strict=False):
            if torch_dtype(type_.dtype, "an argument") is not dtype:
                changes[f"{type_.dtype} -> {_dtype_name(dtype)}"] += 1
    for node in nodes:
        if node.target in _DTYPE_CHANGES and isinstance(node.args[0], fx.Node):
            before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype
            if before is not after:
                changes[f"{_dtype_name(before)} -> {_dtype_name(after)}"] += 1
    return dict(changes)


def _dtype_name(dtype: torch.dtype | np.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _counts_text(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} x {count}" if count > 1 else name for name, count in counts.items()) or "none"
