"""A random program: readable Python source, its arguments, and the conditions it was made under."""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from . import guards

ROWS = 3  # rows of the batch for vmap; the first row is the argument of the other modes
_MAX_ABS = 30.0
_MAX_ELEMENTS = 96
_MAX_RESULTS = 48  # elements that a program returns: the reference of forward mode needs a backward for each
_serial = itertools.count()


class NoChoice(Exception):
    """An operator finds no operand of the kind that it needs."""


class Invalid(Exception):
    """A program that torch does not run, or whose guards do not hold."""


@dataclasses.dataclass(frozen=True)
class Argument:
    """A tensor argument: `kind` is float, complex, int, uint8 or bool; `batched` says whether vmap maps over it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    batched: bool


@dataclasses.dataclass(frozen=True)
class Statement:
    """Lines of Python, the names they define, and the guards that must hold before them."""

    lines: tuple[str, ...]
    defines: tuple[str, ...]
    guards: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.lines)


@dataclasses.dataclass(frozen=True)
class Program:
    """A torch function of some arguments, as statements."""

    seed: int
    arguments: tuple[Argument, ...]
    statements: tuple[Statement, ...]
    results: tuple[str, ...]

    @property
    def source(self) -> str:
        """Return the function's definition."""
        lines = [f"def program({', '.join(a.name for a in self.arguments)}):"]
        lines += [f"    {line}" for statement in self.statements for line in statement.lines]
        return "\n".join([*lines, f"    return ({', '.join(self.results)},)", ""])

    @property
    def with_guards(self) -> str:
        """Return the definition with code that raises `Invalid` if a guard does not hold."""
        lines = [f"def program({', '.join(a.name for a in self.arguments)}):"]
        for statement in self.statements:
            lines += [f"    require({guard}, {guard!r})" for guard in statement.guards]
            lines += [f"    {line}" for line in statement.lines]
            lines += [f"    bounded({', '.join(_names_in(statement))})"]
        return "\n".join([*lines, f"    return ({', '.join(self.results)},)", ""])

    def function(self, guarded: bool = False) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Return the function, compiled from its source."""
        source = self.with_guards if guarded else self.source
        name = f"<fuzz program {self.seed}, {next(_serial)}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        namespace: dict[str, Any] = {"torch": torch, "F": F, "math": math}
        if guarded:
            namespace |= guards.NAMESPACE | {"require": _require, "bounded": _bounded}
        exec(compile(source, name, "exec"), namespace)
        return namespace["program"]

    def inputs(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """Return the arguments for each row of the batch, in the given floating-point dtype."""
        return [[_value(self.seed, a, row, dtype) for a in self.arguments] for row in range(ROWS)]


def arguments_for(seed: int) -> tuple[Argument, ...]:
    """Return one to three arguments, with few different sizes, so that they often broadcast or multiply."""
    rng = random.Random(seed)
    sizes = [rng.randint(2, 5) for _ in range(3)]

    def shape() -> tuple[int, ...]:
        rank = rng.choices([0, 1, 2, 3, 4], [1, 3, 6, 4, 1])[0]
        shape = tuple(1 if rng.random() < 0.08 else rng.choice(sizes) for _ in range(rank))
        return shape if math.prod(shape) <= _MAX_ELEMENTS else shape[:3]

    kinds = ["float", *rng.choices(["float", "complex", "int", "uint8", "bool"], [10, 2, 2, 1, 1], k=rng.randint(0, 2))]
    flags = [rng.random() < 0.8 for _ in kinds]
    if not any(flags):
        flags[0] = True
    return tuple(Argument("abc"[i], kind, shape(), flags[i]) for i, kind in enumerate(kinds))


def generate(
    seed: int, operators: Sequence[Callable[[Any], None]], weights: Sequence[float], most: int = 20
) -> Program | None:
    """Return a program of 3 to `most` operators that torch runs and whose guards hold on every row, or None."""
    rng = random.Random(seed)
    program = Program(seed, arguments_for(seed), (), ("None",))
    rows = [_environment(row, program.arguments) for row in program.inputs(torch.float64)]
    wanted, fresh = rng.randint(3, most), 0
    for _ in range(4 * wanted):
        if len(program.statements) == wanted:
            break
        tensors = {name: x for name, x in rows[0].items() if _NAME.fullmatch(name)}
        writer = Writer(rng, tensors, [a.name for a in program.arguments], fresh)
        try:
            rng.choices(operators, weights)[0](writer)
        except NoChoice:
            continue
        statement = writer.statement()
        writes = not statement.defines or any("_(" in line or "] " in line for line in statement.lines)
        try:
            for row in rows:
                _execute(statement, row)
        except Exception:  # noqa: BLE001 - torch does not run it, so it is no part of the program
            rows = _rebuilt(program)
            continue
        if writes and not _differentiable(rows[0]):
            rows = _rebuilt(program)
            continue
        program = dataclasses.replace(program, statements=(*program.statements, statement))
        fresh += len(statement.defines)
    return _with_results(program, rows[0], rng)


class Writer:
    """The variables of a program while it is written, with their values on the first row."""

    def __init__(self, rng: random.Random, values: dict[str, Any], arguments: Sequence[str], fresh: int):
        self.rng = rng
        self.values = values
        self.arguments = set(arguments)
        self._fresh = fresh
        self._lines: list[str] = []
        self._defines: list[str] = []
        self._guards: list[str] = []

    def statement(self) -> Statement:
        """Return the finished statement."""
        return Statement(tuple(self._lines), tuple(self._defines), tuple(self._guards))

    def let(self, expression: str, *guards: str) -> str:
        """Write ``t7 = expression`` and return the new name."""
        name = self.new()
        self._lines.append(f"{name} = {expression}")
        self._guards += guards
        return name

    def do(self, *lines: str, guards: Sequence[str] = ()) -> None:
        """Write lines unchanged."""
        self._lines += lines
        self._guards += guards

    def new(self) -> str:
        """Return a new name, which the statement must define."""
        name = f"t{self._fresh}"
        self._fresh += 1
        self._defines.append(name)
        return name

    def pick(self, test: Callable[[torch.Tensor], bool] = lambda x: True) -> str:
        """Return a variable whose value passes a test; later variables are more likely."""
        found = [name for name, x in self.values.items() if isinstance(x, torch.Tensor) and _passes(test, x)]
        if not found:
            raise NoChoice
        return self.rng.choices(found, [1 + i for i in range(len(found))])[0]

    def real(self, ndim: int | None = None, at_least: int = 0) -> str:
        """Return a floating-point variable."""
        return self.pick(lambda x: x.is_floating_point() and x.ndim >= at_least and (ndim is None or x.ndim == ndim))

    def integer(self) -> str:
        """Return an integer variable."""
        return self.pick(lambda x: not x.is_floating_point() and not x.is_complex() and x.dtype is not torch.bool)

    def boolean(self) -> str:
        """Return a boolean variable."""
        return self.pick(lambda x: x.dtype is torch.bool)

    def complex(self) -> str:
        """Return a complex variable."""
        return self.pick(lambda x: x.is_complex())

    def like(self, name: str) -> str:
        """Return a floating-point variable that broadcasts with `name`."""
        shape = self.shape(name)
        return self.pick(lambda x: x.is_floating_point() and _broadcasts(x.shape, shape))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a variable."""
        return tuple(self.values[name].shape)

    def dim(self, name: str) -> int:
        """Return a dimension of a variable, sometimes as a negative number."""
        ndim = self.values[name].ndim
        if not ndim:
            raise NoChoice
        return self.rng.randrange(-ndim, ndim)

    def number(self, low: float = -1.5, high: float = 1.5) -> float:
        """Return a literal of two digits."""
        return round(self.rng.uniform(low, high), 2)

    def integers(self, count: int, bound: int, unique: bool = False) -> list[int]:
        """Return literal indices less than `bound`."""
        if unique:
            return self.rng.sample(range(bound), count)
        return [self.rng.randrange(bound) for _ in range(count)]


def _with_results(program: Program, row: dict[str, Any], rng: random.Random) -> Program | None:
    defined = [name for s in program.statements for name in s.defines if isinstance(row.get(name), torch.Tensor)]
    if not defined:
        return None
    used = {name for s in program.statements for name in _names_in(s, right=True)}
    last = [name for name in reversed(defined) if name not in used]
    rest = [name for name in reversed(defined) if name in used]
    rng.shuffle(rest)
    chosen, elements = [], 0
    for name in [*last, *rest[:2]]:
        if elements + row[name].numel() <= _MAX_RESULTS and len(chosen) < 6:
            chosen.append(name)
            elements += row[name].numel()
    if not any(row[name].is_floating_point() or row[name].is_complex() for name in chosen):
        return None
    return dataclasses.replace(program, results=tuple(sorted(chosen, key=defined.index)))


def _environment(row: list[torch.Tensor], arguments: Sequence[Argument]) -> dict[str, Any]:
    namespace: dict[str, Any] = {"torch": torch, "F": F, "math": math} | guards.NAMESPACE
    for argument, x in zip(arguments, row, strict=True):
        leaf = x.requires_grad_() if x.is_floating_point() or x.is_complex() else x
        namespace["leaf " + argument.name] = leaf
        namespace[argument.name] = leaf.clone()
    return namespace


def _execute(statement: Statement, namespace: dict[str, Any]) -> None:
    with torch.no_grad():
        for guard in statement.guards:
            _require(eval(guard, namespace), guard)
    exec(str(statement), namespace)
    _bounded(*(namespace[name] for name in _names_in(statement) if name in namespace))


def _rebuilt(program: Program) -> list[dict[str, Any]]:
    rows = [_environment(row, program.arguments) for row in program.inputs(torch.float64)]
    for row in rows:
        for statement in program.statements:
            exec(str(statement), row)
    return rows


def _differentiable(namespace: dict[str, Any]) -> bool:
    """Return whether torch's autograd still runs: an in-place write may destroy a tensor that a backward needs."""
    leaves = [x for name, x in namespace.items() if name.startswith("leaf ") and x.requires_grad]
    results = [
        x
        for name, x in namespace.items()
        if isinstance(x, torch.Tensor) and not name.startswith("leaf ") and x.requires_grad
    ]
    try:
        torch.autograd.grad(
            [torch.view_as_real(x.resolve_conj()).sum() if x.is_complex() else x.sum() for x in results],
            leaves,
            allow_unused=True,
            retain_graph=True,
        )
    except RuntimeError:
        return False
    return True


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise Invalid(text)


def _bounded(*values: Any) -> None:
    """Return whether every tensor is small, finite, not near overflow, and in float64 if its program is."""
    for x in values:
        if not isinstance(x, torch.Tensor):
            continue
        x = x.detach()
        if x.numel() > _MAX_ELEMENTS or x.numel() == 0:
            raise Invalid("size")
        if x.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64):
            raise Invalid("dtype")
        if x.is_floating_point() or x.is_complex():
            if not bool((x.abs() < _MAX_ABS).all()):
                raise Invalid("magnitude")
        elif x.dtype is torch.int64 and not bool((x.abs() < 10_000).all()):
            raise Invalid("magnitude")


def _value(seed: int, argument: Argument, row: int, dtype: torch.dtype) -> torch.Tensor:
    salt = row if argument.batched else 0
    generator = torch.Generator().manual_seed(seed * 64 + salt * 8 + ord(argument.name) % 8)
    shape = argument.shape
    if argument.kind == "bool":
        return torch.rand(shape, generator=generator) < 0.5
    if argument.kind == "int":
        return torch.randint(-4, 6, shape, generator=generator)
    if argument.kind == "uint8":
        return torch.randint(0, 7, shape, generator=generator, dtype=torch.uint8)
    if argument.kind == "complex":
        parts = _spread(shape, generator), _spread(shape, generator)
        return torch.complex(*parts).to(torch.complex64 if dtype is torch.float32 else torch.complex128)
    return _spread(shape, generator).to(dtype)


def _spread(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return numbers between -2 and 2 that float32 represents exactly, no two near each other and none near 0."""
    count = math.prod(shape)
    steps = torch.randperm(count, generator=generator, dtype=torch.float64) + 0.5
    jitter = torch.rand(count, generator=generator, dtype=torch.float64) * 0.3
    return ((steps + jitter) / count * 4 - 2).reshape(shape).float().double()


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))


_NAME = re.compile(r"\b(?:t\d+|[abc])\b")


def _names_in(statement: Statement, right: bool = False) -> list[str]:
    """Return the variables that a statement mentions; with `right`, the variables that it reads."""
    found = dict.fromkeys(_NAME.findall(str(statement)))
    return [name for name in found if not (right and name in statement.defines)]


def _passes(test: Callable[[torch.Tensor], bool], x: torch.Tensor) -> bool:
    """Return whether a value passes a test. Torch refuses to read a result of `split` after a write to another one."""
    try:
        return test(x)
    except RuntimeError:
        return False
