"""Run kernels beside their references, and compile them with Triton, on a machine without a GPU."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.kernels import _eager, _tuning
from jtbridge.kernels._launch import interpreting
from jtbridge.triton import unsupported_reason

_xla = importlib.import_module("jtbridge._backends.xla")

ARCHITECTURES = (80, 90)
ON_GPU = jax.default_backend() == "gpu"  # if True, kernels are compiled and run instead of interpreted
# Relative to the largest number of a result: one rounding to the dtype, and sums of a few hundred numbers.
# Triton's interpreter truncates to bfloat16 where a GPU rounds.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.4e-2 if interpreting() else 8e-3, "float16": 1e-3}

needs_triton = pytest.mark.skipif(
    unsupported_reason() is not None, reason=f"Triton cannot be used: {unsupported_reason()}"
)
needs_interpreter = pytest.mark.skipif(not interpreting(), reason="runs in a process with TRITON_INTERPRET=1")
needs_kernels = pytest.mark.skipif(
    not interpreting() and (unsupported_reason() is not None or jax.default_backend() != "gpu"),
    reason="kernels run on a GPU, or in a process with TRITON_INTERPRET=1",
)
needs_compiler = pytest.mark.skipif(interpreting(), reason="kernels are interpreted in this process, not compiled")
# A test with the argument `count` takes the first `count` entries of each table of tuning candidates: the default, or,
# under `make test-kernels-all`, every candidate.
candidate_counts = pytest.mark.parametrize(
    "count", [pytest.param(1, id="default"), pytest.param(None, id="all", marks=pytest.mark.exhaustive)]
)


def normal(*shape: int, dtype: Any = "float32", seed: int = 0) -> jax.Array:
    """Return normal numbers, the same in every run."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.dtype(dtype))


def on_host(array: jax.Array) -> torch.Tensor:
    """Move a tensor to the CPU, where the tests' torch code creates tensors."""
    return jtbridge.to_torch(jax.device_put(array, jax.devices("cpu")[0]))


def assert_close(got: Any, want: Any, factor: float = 1.0, terms: float = 0.0) -> None:
    """Assert equal shapes and dtypes, and values that differ by no more than rounding to the dtype.

    `terms` is the size of the terms of a sum that may cancel to 0.
    """
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.shape == w.shape
        assert g.dtype == w.dtype
        wide, expected = np.asarray(g, np.float64), np.asarray(w, np.float64)
        finite = expected[np.isfinite(expected)]
        scale = np.abs(finite).max(initial=max(terms, 1e-30))
        atol = TOLERANCE[str(g.dtype)] * factor * scale
        np.testing.assert_allclose(wide, expected, rtol=0, atol=atol, equal_nan=True)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel launch in a program."""

    kernel: Any
    operands: tuple[Any, ...]
    out_types: tuple[jax.ShapeDtypeStruct, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class Usage:
    """The resources of a streaming multiprocessor that a compiled kernel uses.

    Registers and spilled registers depend on Triton's compiler. The tests hold the figures of 3.9; with another
    one it is 0 of both, and that the kernel compiles and its shared memory fits is all that is held.
    """

    name: str
    registers: int
    spilled: int  # bytes
    shared: int  # bytes


def launches(fn: Callable[..., Any], *args: Any) -> list[Launch]:
    """Return the launches in ``fn(*args)`` lowered for a GPU."""
    found: list[Launch] = []

    def record(
        kernel: Any, operands: Sequence[Any], *, out_types: Any, grid: Any, constants: Any, **options: int
    ) -> Any:
        del grid
        held = tuple(
            jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array | np.ndarray) else x for x in operands
        )
        found.append(Launch(kernel, held, tuple(out_types), dict(constants), **options))
        return [jnp.zeros(t.shape, t.dtype) for t in out_types]

    from jtbridge.kernels import _launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_launch, "triton_call", record)
        jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))
    assert found, "no kernel was launched"
    return found


def in_turn(*tables: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return tuples with one entry of each table, as many as the longest table has; shorter tables repeat."""
    return [tuple(table[i % len(table)] for table in tables) for i in range(max(map(len, tables)))]


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, dict[str, Any], int]]]:
    """Record the kernel, constants and warps of the launches in programs that are made inside the block."""
    found: list[tuple[str, dict[str, Any], int]] = []
    launch = _tuning.launch

    def record(kernel: Any, *operands: Any, **how: Any) -> list[jax.Array]:
        found.append((kernel.__name__, dict(how["constants"]), how["num_warps"]))
        return launch(kernel, *operands, **how)

    _eager._program.clear_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tuning, "launch", record)
        yield found


def another_process(patch: pytest.MonkeyPatch) -> None:
    """Forget the tuned configurations of this process, so that they are read from disk again."""
    patch.setattr(_tuning, "_FOUND", {})


@contextlib.contextmanager
def all_proven() -> Iterator[None]:
    """Let "auto" use every kernel, as on a GPU on which all are proven."""
    backend = _xla.TritonBackend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "unpreferred_reason", lambda self, platform: None)
        patch.setattr(backend, "for_auto", lambda self: self)
        yield


def assert_kernels_get_operator_arguments(
    function: Callable[..., Any],
    arguments: Sequence[jax.Array],
    wrt: int | tuple[int, ...],
    kernels: dict[str, int],
) -> None:
    """Assert which kernels a wrapped function's program has, and that they give its operators' results and gradients.

    The kernels' references run instead of the kernels, which have separate tests.
    """
    f, g = jtbridge.wrap(function, backend="triton"), jtbridge.wrap(function, backend="xla")

    def loss(f: Callable[..., Any]) -> Callable[..., jax.Array]:
        return lambda *args: jnp.sin(f(*args).astype(jnp.float32)).sum()

    assert collections.Counter(kernels_in(jax.grad(loss(f), wrt), *arguments)) == kernels
    with all_proven(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_xla, "triton_unsupported_reason", lambda platform: None)
        patch.setattr(_xla, "GPU_PLATFORMS", ("cpu",))
        assert jtbridge.explain(jtbridge.wrap(function), *arguments).backend == "triton"
        assert_close(f(*arguments), g(*arguments))
        assert_close(jax.grad(loss(f), wrt)(*arguments), jax.grad(loss(g), wrt)(*arguments), factor=4)
        rows = [jnp.stack([x, x + 1]) for x in arguments]
        assert_close(jax.vmap(f)(*rows), jax.vmap(g)(*rows))
        got = jax.vmap(jax.grad(loss(f), wrt))(*rows)
        # Where terms cancel, a CPU that adds in float16 rounds more than a CPU that adds in float32.
        assert_close(got, jax.vmap(jax.grad(loss(g), wrt))(*rows), factor=8)


def made_for(launch: Launch, *target: Any) -> Any:
    """Compile a launch for a GPU, present or not: "cuda", capability, lanes; or "hip", architecture, lanes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    given = (*launch.operands, *launch.out_types)
    signature = {name: _triton_type(x) for name, x in zip(names, given, strict=False)}
    signature |= dict.fromkeys(launch.constants, "constexpr")
    attributes = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(given) if hasattr(x, "shape")}
    source = ASTSource(launch.kernel, signature, launch.constants, attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget(*target), options=options)


def compiled(launch: Launch, architecture: int, folder: Path) -> Usage:
    """Compile a launch for an NVIDIA GPU, and return the resources that NVIDIA's tool reports."""
    import triton

    made = made_for(launch, "cuda", architecture, 32)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    registers, local = (int(re.search(rf"{word}:(\d+)", text).group(1)) for word in ("REG", "LOCAL"))  # type: ignore[union-attr]
    stack = int(re.search(r"STACK:(\d+)", text).group(1))  # type: ignore[union-attr]
    if not triton.__version__.startswith("3.9."):
        registers = local = stack = 0
    return Usage(made.metadata.name, registers, local + stack, made.metadata.shared)


def _triton_type(x: Any) -> str:
    from jax_triton import triton_lib

    # The names that the lowering uses; jax-triton 0.4 and 0.3 have different names for the function.
    name = getattr(triton_lib, "get_type_id", None) or triton_lib.get_triton_type
    return name(jax.core.ShapedArray(x.shape, x.dtype) if hasattr(x, "shape") else x)


@contextlib.contextmanager
def pretending(architecture: int) -> Iterator[None]:
    """Let a process without a GPU lower programs for a simulated GPU."""
    from jax_triton import triton_lib

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_lib.triton_kernel_call_lib, "get_compute_capability", lambda device: architecture)
        yield


def kernels_in(fn: Callable[..., Any], *args: Any, platforms: Sequence[str] = ("cuda",)) -> list[str]:
    """Return the names of the Triton kernels in a lowered program, one for each call, from the operations' scopes."""
    with pretending(90):
        text = jax.jit(fn).trace(*args).lower(lowering_platforms=tuple(platforms)).as_text(debug_info=True)
    places = dict(re.findall(r"^(#loc\d+) = loc\((.*)\)$", text, re.MULTILINE))
    calls = re.findall(r"custom_call @triton_kernel_call.*loc\((#loc\d+)\)", text)
    return [_scope(places, place) for place in calls]


def _scope(places: dict[str, str], place: str) -> str:
    path = re.search(r'"([^"]*)"', places[place])
    assert path is not None
    return path.group(1).removesuffix("/triton_kernel_call").rsplit("/", 1)[-1]
