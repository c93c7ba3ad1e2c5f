"""Arrays of more than 2^31 elements, whose offsets do not fit into 32 bits: every row is computed as it is alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jtbridge import kernels
from jtbridge.core.dtypes import torch_dtype
from jtbridge.kernels import _tuning
from jtbridge.triton import fixed_interpreter

from .harness import assert_close, needs_compiler, needs_interpreter, needs_kernels, normal

N, MANY = 4096, (1 << 19) + 3  # elements of a row; rows of more than 2^31 elements in all
WEIGHT, MATRIX = normal(N, seed=1, dtype="bfloat16"), normal(N, 16, seed=2, dtype="bfloat16")
ANGLES = normal(4, 128, seed=3, dtype="bfloat16")

# Functions of x[rows, N] that compute each row from its own numbers alone.
FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": kernels.softmax,
    "softmax of short rows": lambda x: kernels.softmax(x.reshape(-1, 64)).reshape(x.shape),
    "layer_norm": lambda x: kernels.layer_norm(x, WEIGHT, WEIGHT),
    "rms_norm": lambda x: kernels.rms_norm(x, WEIGHT),
    "rms_norm of short rows": lambda x: kernels.rms_norm(x.reshape(-1, 64), WEIGHT[:64]).reshape(x.shape),
    "swiglu": lambda x: kernels.swiglu(x, x),
    "rope": lambda x: kernels.rope(x.reshape(-1, 8, 4, 128), ANGLES, ANGLES),
    "cross_entropy": lambda x: kernels.cross_entropy(x, jnp.full(len(x), 7), reduction="none"),
    "attention": lambda x: kernels.attention(*[x.reshape(-1, 1, 32, 128)] * 3),
    "matmul": lambda x: kernels.matmul(x, MATRIX),
}
each = pytest.mark.parametrize("name", FUNCTIONS)


def with_gradient(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, pull = jax.vjp(function, x)
        return y, pull(y)[0]

    return jax.jit(both)


FEW = 6


@needs_kernels
@each
@pytest.mark.parametrize("rows", [FEW, pytest.param(MANY, marks=[pytest.mark.gpu, needs_compiler])])
def test_each_row_is_independent_of_the_others(name, rows):
    both = with_gradient(FUNCTIONS[name])

    def numbers() -> jax.Array:
        wide = jax.lax.broadcasted_iota("float32", (rows, N), 0) * 3 + jnp.arange(N, dtype="float32")
        return jnp.sin(wide).astype("bfloat16")

    x = jax.jit(numbers)()
    y, grad = both(x)
    for picked in (slice(0, 2), slice(rows // 2, rows // 2 + 2), slice(rows - 2, rows)):
        want, by_x = both(x[picked])
        assert_close(y[picked], want)
        assert_close(grad[picked], by_x)


@dataclasses.dataclass(frozen=True)
class Launched:
    """A launch in a program, with types instead of arrays."""

    kernel: Any
    operands: list[Any]
    results: list[jax.ShapeDtypeStruct]
    grid: tuple[int, ...]
    constants: dict[str, Any]

    @classmethod
    def all_of(cls, function: Callable[..., Any], rows: int) -> list[Launched]:
        """Return the launches in the program of a function of x[rows, N]."""
        found = []

        def record(kernel: Any, *operands: Any, out_types: Any, grid: Any, constants: Any, **_: Any) -> list[jax.Array]:
            held = [jax.ShapeDtypeStruct(a.shape, a.dtype) if hasattr(a, "shape") else a for a in operands]
            found.append(cls(kernel, held, list(out_types), grid, dict(constants)))
            return [jnp.zeros(t.shape, t.dtype) for t in out_types]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_tuning, "launch", record)
            jax.jit(function).trace(jax.ShapeDtypeStruct((rows, N), "bfloat16")).lower()
        return found

    def last_program(self, operands: list[Any]) -> list[torch.Tensor]:
        """Return the memory of the results after only the last program of the grid has run."""
        from triton.runtime.interpreter import interpreter_builder as builder

        results = [untouched(t) for t in self.results]
        grid = (*self.grid, 1, 1)[:3]
        set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx
        with fixed_interpreter(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(builder, "set_grid_dim", lambda *_: set_dim(*grid))
            patch.setattr(builder, "set_grid_idx", lambda *_: set_idx(*(size - 1 for size in grid)))
            self.kernel[(1,)](*operands, *results, **self.constants)
        return results


def untouched(type_: Any) -> torch.Tensor:
    """Return zeros for which the system allocates only the pages that are read or written."""
    bits = torch.from_numpy(np.zeros(type_.shape, f"u{np.dtype(type_.dtype).itemsize}"))
    return bits.view(torch_dtype(np.dtype(type_.dtype), "an operand"))


def ending_with(type_: jax.ShapeDtypeStruct, few: torch.Tensor) -> torch.Tensor:
    """Return memory whose last elements are those of an array."""
    memory = untouched(type_)
    memory.view(-1)[-few.numel() :] = few.view(-1)
    return memory


@needs_interpreter
@each
def test_the_last_program_of_many_computes_the_last_row(name):
    """It reads and writes where the offsets of elements are largest."""
    both = with_gradient(FUNCTIONS[name])
    small, large = Launched.all_of(both, FEW), Launched.all_of(both, MANY)
    assert [s.kernel.__name__ for s in small] == [s.kernel.__name__ for s in large]
    # A program of this kernel takes thousands of rows, which are too many for the interpreter.
    pairs = [(s, b) for s, b in zip(small, large, strict=True) if s.kernel.__name__ != "norm_backward"]
    assert pairs
    rng = np.random.default_rng(0)
    for few, many in pairs:
        given, same = [], []
        for a, b in zip(few.operands, many.operands, strict=True):
            if not hasattr(a, "shape"):
                assert a == b
                given, same = [*given, a], [*same, b]
                continue
            memory = untouched(a)
            memory.copy_(torch.from_numpy(rng.integers(1, 3, a.shape)))
            given, same = [*given, memory], [*same, ending_with(b, memory)]
        compared = 0
        want, got = few.last_program(given), many.last_program(same)
        for w, g in zip(want, got, strict=True):
            if w.numel() * MANY != g.numel() * FEW:
                continue  # a sum over rows
            row = w.numel() // FEW
            torch.testing.assert_close(g.view(-1)[-row:], w.view(-1)[-row:], rtol=0, atol=0)
            assert w.view(-1)[-row:].count_nonzero() > 0
            compared += 1
        assert compared > 0
