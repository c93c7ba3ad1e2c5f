"""vmap of operators that get several dtypes, or tensors without dimensions, against a loop over the rows in torch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

import jtbridge
from jtbridge.errors import SequentialVmapWarning
from tests.compare import assert_matches

# Functions of two tensors. In type promotion, torch gives tensors without dimensions lower priority.
OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "where": lambda x, y: torch.where(torch.tensor([True, False, True]), x, y),
    "where of a number": lambda x, y: torch.where(x.sum() > 0, x, y),
    "clamp": lambda x, y: torch.clamp(x, min=y),
    "clip": lambda x, y: x.clip(None, y),
    "maximum": torch.maximum,
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y, value=2),
    "cat": lambda x, y: torch.cat([x.reshape(-1), y.reshape(-1)]),
    "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(
        x.expand(3), y.expand(3), reduction="none"
    ),
    "keywords": lambda x, y: torch.where(condition=torch.tensor(True), input=x, other=y),
}
DTYPES = [
    (jnp.float32, jnp.bfloat16),
    (jnp.bfloat16, jnp.float32),
    (jnp.float32, jnp.float16),
    (jnp.int32, jnp.int8),
    (jnp.int8, jnp.int32),
    (jnp.int32, jnp.float32),
    (jnp.float32, jnp.int32),
    (jnp.uint8, jnp.int8),
]


def by_rows(f: Callable, arrays: Sequence[jax.Array], axes: Sequence[int | None]) -> torch.Tensor:
    tensors = [jtbridge.to_torch(a) for a in arrays]
    rows = [f(*(x if axis is None else x[i] for x, axis in zip(tensors, axes, strict=True))) for i in range(2)]
    return torch.stack(rows)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_dtype_of_a_batch_matches_a_row(name: str, jit: bool):
    f = OPERATORS[name]
    compared = 0
    for dtypes in DTYPES:
        for shapes in [((3,), ()), ((), (3,)), ((), ())]:
            for axes in [(0, 0), (0, None), (None, 0)]:
                wholes = [shape if axis is None else (2, *shape) for shape, axis in zip(shapes, axes, strict=True)]
                arrays = [
                    jnp.arange(1, 1 + math.prod(s)).reshape(s).astype(d) for s, d in zip(wholes, dtypes, strict=True)
                ]
                try:
                    expected = by_rows(f, arrays, axes)
                except RuntimeError:  # torch has no such operator for these dtypes
                    continue
                mapped = jax.vmap(jtbridge.wrap(f), axes)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", SequentialVmapWarning)
                    actual = (jax.jit(mapped) if jit else mapped)(*arrays)
                assert_matches(actual, expected, 2e-2)  # parts are computed in the narrower dtype
                compared += 1
    assert compared > 20


@pytest.mark.parametrize("batched", [(0, None, None), (0, 0, 0), (None, None, 0)])
def test_layer_norm_of_bfloat16_with_weights_of_float32(batched: tuple):
    def f(x, weight, bias):
        return F.layer_norm(x, (3,), weight, bias)

    arrays = [
        jax.random.normal(jax.random.key(i), (2, 3)[axis is None :], dtype)
        for i, (axis, dtype) in enumerate(zip(batched, (jnp.bfloat16, jnp.float32, jnp.float32), strict=True))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SequentialVmapWarning)
        actual = jax.vmap(jtbridge.wrap(f), batched)(*arrays)
    assert actual.dtype == jnp.bfloat16
    assert_matches(actual, by_rows(f, arrays, batched))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_index_select_of_one_number(dim: int):
    def f(x, i):
        return x.index_select(dim, i)

    x, i = jnp.arange(24.0).reshape(2, 3, 4), jnp.asarray([1, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SequentialVmapWarning)
        actual = jax.vmap(jtbridge.wrap(f))(x, i)
    assert_matches(actual, by_rows(f, [x, i], (0, 0)))


def test_addr_to_one_number():
    def f(x, y):
        return torch.addr(x, y, y)

    x, y = jnp.ones(2), jnp.ones((2, 3), jnp.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SequentialVmapWarning)
        assert_matches(jax.vmap(jtbridge.wrap(f))(x, y), by_rows(f, [x, y], (0, 0)))


def test_mixed_dtypes_supported_by_torch_vmap_run_as_one_batch():
    def f(x, scale, i):
        y = x * scale + torch.arange(3)
        loss = F.cross_entropy(y.float(), i)
        return y[i] * loss, F.one_hot(i, 3)

    with warnings.catch_warnings():
        warnings.simplefilter("error", SequentialVmapWarning)
        jax.vmap(jtbridge.wrap(f))(jnp.ones((2, 3), jnp.bfloat16), jnp.ones(2), jnp.asarray([0, 2]))
