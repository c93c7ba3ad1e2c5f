"""Compare a random program under jtbridge with torch: value, vjp, jvp and vmap."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jtbridge
from jtbridge.translate import forced_islands
from tests import reference
from tests.compare import as_numpy, jax_dtype

from .operators import OPERATORS, WEIGHTS
from .programs import Invalid, Program, generate

MODES = ("value", "vjp", "jvp", "vmap")
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5}
# With this option XLA compiles small programs about twice as fast, and rounds within the tolerances used here.
_FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_MAX_GRADIENT = 300.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """A mode in which a backend differs from torch, or refuses a program that torch runs."""

    # "different", "refused" by an error of jtbridge, "crashed" by any other, or "torch" which refuses it as well.
    kind: str
    backend: str
    mode: str
    dtype: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.mode} on {self.backend}, {self.dtype}: {self.text}"

    @property
    def signature(self) -> tuple[str, str, str]:
        """Return a description of the failure, which stays the same while a program is made smaller."""
        # A refusal in one mode is most often one in all.
        return self.kind, self.mode if self.kind == "different" else "", self.text.split(":")[0]


@dataclasses.dataclass
class Expected:
    """Torch's result, and the difference between its float32 and its float64 result."""

    inputs: list[list[torch.Tensor]]
    cotangents: list[torch.Tensor]
    tangents: list[torch.Tensor]
    results: dict[str, list[torch.Tensor]]
    noise: dict[str, list[float]]
    moving: list[int]  # the arguments that have derivatives
    batched: list[bool]  # whether vmap maps over an argument
    differentiable: list[int]  # the results that have a floating-point or complex dtype


def comparable(number: int, most: int = 20) -> Program:
    """Return the random program of a number: the first of its series whose results do not depend on rounding."""
    for attempt in itertools.count():
        program = generate(number * 1000 + attempt, OPERATORS, WEIGHTS, most)
        if program is not None:
            try:
                expected(program, torch.float32)
            except Invalid:
                continue
            return program
    raise AssertionError


def expected(program: Program, dtype: torch.dtype) -> Expected:
    """Return torch's results in a dtype; raise `Invalid` if rounding alone could explain a difference."""
    return _of_both_dtypes(program)[dtype]


@functools.lru_cache(maxsize=1)
def _of_both_dtypes(program: Program) -> dict[torch.dtype, Expected]:
    try:
        wide = _by_torch(program, torch.float64)
        narrow = _by_torch(program, torch.float32)
    except (RuntimeError, IndexError) as error:  # an in-place write to a leaf, say, which the generator does not see
        raise Invalid("torch") from error
    if any(bool((g.abs() > _MAX_GRADIENT).any()) for mode in ("vjp", "jvp") for g in wide.results[mode]):
        raise Invalid("gradient")
    for mode in MODES:
        for x, y in zip(wide.results[mode], narrow.results[mode], strict=True):
            if x.shape != y.shape:
                raise Invalid("shape")
            if not x.is_floating_point() and not x.is_complex():
                if not torch.equal(x, y):
                    raise Invalid("rounding of integers")
                continue
            if not bool(x.isfinite().all() & y.isfinite().all()):
                raise Invalid("finite")
            noise = float((x - y).abs().max())
            if noise > 2e-4 * max(1.0, float(x.abs().max())):
                raise Invalid("rounding")
            narrow.noise[mode].append(noise)
            wide.noise[mode].append(0.0)
    return {torch.float64: wide, torch.float32: narrow}


def check(
    program: Program,
    dtype: torch.dtype,
    backend: str,
    eager: bool = False,
    want: Expected | None = None,
    modes: tuple[str, ...] = MODES,
    islands: float = 0.0,
) -> list[Finding]:
    """Return every difference from torch, and every refusal, of one backend.

    Torch runs a share `islands` of the operators, chosen by their names, inside translated programs.
    """
    want = want or expected(program, dtype)
    with jax.enable_x64(dtype is torch.float64), _silently(), forced(program.seed, islands):
        runs = {mode: run for mode, run in _modes(program, want, backend).items() if mode in modes}
        if not eager and len(runs) > 1:
            together = jax.jit(lambda arrays: {m: f(arrays) for m, f in runs.items()}, compiler_options=_FAST)
            with contextlib.suppress(Exception):  # the code below finds which of the modes raises it
                found = jax.block_until_ready(together(_arrays(want)))
                return _differences(found, want, backend, dtype)
        findings = []
        for mode, run in runs.items():
            try:
                run = run if eager else jax.jit(run, compiler_options=_FAST)
                found = jax.block_until_ready(run(_arrays(want)))
            except Exception as error:  # noqa: BLE001 - any error is a finding
                kind = "refused" if isinstance(error, jtbridge.errors.JtbridgeError) else "crashed"
                if mode == "jvp" and not _has_forward_mode(program, want):
                    kind = "torch"
                text = f"{type(error).__name__}: {_without_places(str(error))}"
                findings.append(Finding(kind, backend, mode, str(dtype), text))
                continue
            findings += _differences({mode: found}, want, backend, dtype)
        return findings


@contextlib.contextmanager
def forced(seed: int, share: float) -> Iterator[None]:
    """Have torch run a share of the operators that it can run inside translated programs."""
    if not share:
        yield
        return

    def rule(node: torch.fx.Node) -> bool:
        return zlib.crc32(f"{seed} {node.name} {node.target}".encode()) < share * 2**32

    with jtbridge.config(islands="needed"), forced_islands(rule):
        yield


def called_because(program: Program, dtype: torch.dtype) -> str | None:
    """Return why ``backend="auto"`` does not translate a program, or None if it does."""
    with jax.enable_x64(dtype is torch.float64), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        wrapped = jtbridge.wrap(program.function(), backend="auto")
        jax.jit(lambda *xs: wrapped(*xs)).lower(*map(_array, program.inputs(dtype)[0]))
    reasons = [str(w.message) for w in seen if issubclass(w.category, jtbridge.errors.CalledWarning)]
    return reasons[0] if reasons else None


def _modes(program: Program, want: Expected, backend: str) -> dict[str, Callable[[dict[str, Any]], Any]]:
    wrapped = jtbridge.wrap(program.function(), backend=backend)
    axes = tuple(0 if a.batched else None for a in program.arguments)

    def of_moving(arrays: dict[str, Any]) -> Callable[..., list[Any]]:
        def call(*moving: Any) -> list[Any]:
            filled = list(arrays["inputs"])
            for i, x in zip(want.moving, moving, strict=True):
                filled[i] = x
            results = wrapped(*filled)
            return [results[i] for i in want.differentiable]

        return call

    def moving(arrays: dict[str, Any]) -> list[Any]:
        return [arrays["inputs"][i] for i in want.moving]

    return {
        "value": lambda arrays: list(wrapped(*arrays["inputs"])),
        "vjp": lambda arrays: list(jax.vjp(of_moving(arrays), *moving(arrays))[1](arrays["cotangents"])),
        "jvp": lambda arrays: jax.jvp(of_moving(arrays), moving(arrays), arrays["tangents"])[1],
        "vmap": lambda arrays: list(jax.vmap(wrapped, axes)(*arrays["batch"])),
    }


def _by_torch(program: Program, dtype: torch.dtype) -> Expected:
    function = program.function(guarded=dtype is torch.float64)

    def run(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return function(*(x.clone() for x in xs))

    rows = program.inputs(dtype)
    inputs = rows[0]
    moving = [i for i, x in enumerate(inputs) if x.is_floating_point() or x.is_complex()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = [y.detach().clone() for y in run(*inputs)]
        leaves = [x.clone().requires_grad_() if i in moving else x for i, x in enumerate(inputs)]
        if [y.shape for y in run(*leaves)] != [y.shape for y in value]:
            raise Invalid("shapes that depend on requires_grad")  # refused
        differentiable = [i for i, y in enumerate(value) if y.is_floating_point() or y.is_complex()]
        random = np.random.default_rng(program.seed)
        cotangents = [_direction(random, value[i]) for i in differentiable]
        tangents = [_direction(random, inputs[i]) for i in moving]

        def of_moving(*xs: torch.Tensor) -> list[torch.Tensor]:
            filled = list(inputs)
            for i, x in zip(moving, xs, strict=True):
                filled[i] = x
            results = run(*filled)
            return [results[i] for i in differentiable]

        chosen = [inputs[i] for i in moving]
        each = [run(*row) for row in rows]
        results = {
            "value": value,
            "vjp": reference.vjp(of_moving, chosen, cotangents),
            "jvp": [_detached(y) for y in reference.jvp(of_moving, chosen, tangents)],
            "vmap": [torch.stack([_detached(y) for y in column]) for column in zip(*each, strict=True)],
        }
    return Expected(
        rows,
        cotangents,
        tangents,
        results,
        collections.defaultdict(list),
        moving,
        [a.batched for a in program.arguments],
        differentiable,
    )


def _has_forward_mode(program: Program, want: Expected) -> bool:
    """Return whether torch gives a forward derivative, by forward mode or by differentiating its backward."""
    function = program.function()

    def of_moving(*xs: torch.Tensor) -> list[torch.Tensor]:
        filled = [x.clone() for x in want.inputs[0]]
        for i, x in zip(want.moving, xs, strict=True):
            filled[i] = x.clone()
        results = function(*filled)
        return [results[i] for i in want.differentiable]

    inputs = [want.inputs[0][i] for i in want.moving]
    try:
        torch.func.jvp(of_moving, tuple(inputs), tuple(want.tangents))
    except Exception:  # noqa: BLE001 - whatever keeps torch from it
        try:
            leaves = reference.leaves_of_graph(inputs)
            results = of_moving(*leaves)
            cotangents = [torch.ones_like(y).requires_grad_() for y in results]
            reference.gradients(reference.gradients(results, leaves, cotangents, again=True), cotangents, want.tangents)
        except Exception:  # noqa: BLE001 - the same
            return False
    return True


def _without_places(text: str) -> str:
    """Return the line of an error that names the exception that was raised, without the lines that say where."""
    raised = [line for line in text.splitlines() if " raised " in line] or [text]
    return " ".join(raised[-1].split())[:600]


def _arrays(want: Expected) -> dict[str, Any]:
    return {
        "inputs": [_array(x) for x in want.inputs[0]],
        "cotangents": [_array(x) for x in want.cotangents],
        "tangents": [_array(x) for x in want.tangents],
        "batch": [
            _array(torch.stack(column) if batched else column[0])
            for batched, column in zip(want.batched, zip(*want.inputs, strict=True), strict=True)
        ],
    }


def _differences(found: dict[str, Any], want: Expected, backend: str, dtype: torch.dtype) -> list[Finding]:
    findings = []
    for mode, arrays in found.items():
        noise = iter(want.noise[mode])
        for i, (array, tensor) in enumerate(zip(arrays, want.results[mode], strict=True)):
            allowed = next(noise) if tensor.is_floating_point() or tensor.is_complex() else 0.0
            text = _difference(array, tensor, allowed, dtype)
            if text:
                findings.append(Finding("different", backend, mode, str(dtype), f"result {i}: {text}"))
    return findings


def _difference(array: Any, tensor: torch.Tensor, noise: float, dtype: torch.dtype) -> str | None:
    if array.shape != tuple(tensor.shape):
        return f"shape {array.shape}, torch has {tuple(tensor.shape)}"
    if array.dtype != jax_dtype(tensor.dtype):
        return f"dtype {array.dtype}, torch has {tensor.dtype}"
    actual, right = np.asarray(array), as_numpy(tensor)
    if right.dtype.kind not in "fc":
        return None if np.array_equal(actual, right) else f"{actual.tolist()}, torch has {right.tolist()}"
    scale = max(1.0, float(np.abs(right).max(initial=0.0)))
    largest = float(np.abs(actual - right).max(initial=0.0))
    if largest <= _TOLERANCE[dtype] * scale + 20 * noise:
        return None
    return f"differs by {largest:.3g}: {actual.tolist()}, torch has {right.tolist()}"


def _array(tensor: torch.Tensor) -> jax.Array:
    return jnp.asarray(as_numpy(tensor))


def _detached(x: torch.Tensor) -> torch.Tensor:
    return x.detach().resolve_conj().resolve_neg()


def _direction(random: np.random.Generator, like: torch.Tensor) -> torch.Tensor:
    parts = random.uniform(-1, 1, (2, *like.shape))
    return torch.as_tensor(parts[0] + 1j * parts[1] if like.is_complex() else parts[0]).to(like.dtype)


@contextlib.contextmanager
def _silently() -> Iterator[None]:
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("strict"):
        warnings.simplefilter("ignore")
        yield
