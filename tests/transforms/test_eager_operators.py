"""Eager batches of torch's operators and their gradients, compared with the rows: torch.vmap is wrong for some."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import jtbridge

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch warns of old operators, and of batches that it runs row by row
    pytest.mark.usefixtures("x64"),
]

ROWS, MAX_SAMPLES = 3, 5
# Results that differ between two runs.
RANDOM = ("rand", "normal", "dropout", "bernoulli", "multinomial", "uniform", "exponential", "geometric", "cauchy")
# Uninitialised memory, eigenvectors, which may have any phase, and operators for GPUs only.
UNDEFINED = ("empty", "svd_lowrank", "pca_lowrank", "rrelu", "linalg.eig", "jiterator")
OPERATORS = {
    f"{op.name}.{op.variant_test_name}".removesuffix("."): op
    for op in op_db
    if torch.float64 in op.dtypes and not any(part in op.name for part in RANDOM + UNDEFINED)
}
# Which of the arguments are batched.
PATTERNS: dict[str, Callable[[int], bool]] = {
    "all": lambda position: True,
    "first": lambda position: position == 0,
    "others": lambda position: position > 0,
}


class Case:
    """An operator at one sample of its arguments, as a function of the tensors among them."""

    def __init__(self, op: Any, sample: Any):
        self._op = op
        leaves, self._structure = tree_flatten((sample.input, sample.args, sample.kwargs))
        self._positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._leaves = leaves
        self.tensors = [leaves[i].detach() for i in self._positions]
        self.differentiated = tuple(i for i, x in enumerate(self.tensors) if x.is_floating_point())

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(self._leaves)
        for position, tensor in zip(self._positions, tensors, strict=True):
            leaves[position] = tensor
        first, args, kwargs = tree_unflatten(leaves, self._structure)
        return tuple(x for x in tree_leaves(self._op.op(first, *args, **kwargs)) if isinstance(x, torch.Tensor))

    def loss(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return a weighted sum of squares of the results."""
        total = torch.zeros((), dtype=torch.float64)
        for result in self(*tensors):
            if result.is_floating_point():
                weights = torch.linspace(0.3, 1.7, max(1, result.numel()), dtype=torch.float64)[: result.numel()]
                total = total + (result**2 * weights.reshape(result.shape)).sum()
        return total

    def gradient(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = [x.clone().requires_grad_(i in self.differentiated) for i, x in enumerate(tensors)]
        return torch.autograd.grad(
            self.loss(*given), [given[i] for i in self.differentiated], allow_unused=True, materialize_grads=True
        )


def cases(op: Any) -> list[Case]:
    samples = list(op.sample_inputs("cpu", torch.float64))
    samples = [sample for sample in samples if not sample.kwargs.get("dropout_p")]
    found = [Case(op, sample) for sample in samples[:: max(1, len(samples) // MAX_SAMPLES)]]
    dense = [case for case in found if all(x.layout is torch.strided for x in case.tensors)]
    return [case for case in dense if case.tensors and not any(x.is_complex() for x in case.tensors)]


def rows_of(case: Case, pattern: Callable[[int], bool]) -> list[list[torch.Tensor]]:
    scales = [1 - 0.07 * row for row in range(ROWS)]
    return [
        [x * scale if x.is_floating_point() and pattern(i) else x.clone() for i, x in enumerate(case.tensors)]
        for scale in scales
    ]


def columns_of(rows: Sequence[Sequence[torch.Tensor]], batched: Sequence[bool], axis: int) -> list[jax.Array]:
    columns = list(zip(*rows, strict=True))
    return [
        jnp.asarray(np.moveaxis(torch.stack(column).numpy(), 0, axis) if is_batched else column[0].numpy())
        for column, is_batched in zip(columns, batched, strict=True)
    ]


def expected(fn: Callable[..., tuple[torch.Tensor, ...]], rows: list[list[torch.Tensor]]) -> list[np.ndarray] | None:
    """Return the results of the rows; None if torch has none, or if JAX has no dtype for them."""
    try:
        results = [fn(*(x.clone() for x in row)) for row in rows]
        return [
            torch.stack(column).detach().resolve_conj().resolve_neg().numpy() for column in zip(*results, strict=True)
        ]
    except (RuntimeError, TypeError, ValueError):
        return None


@pytest.mark.parametrize("name", OPERATORS)
def test_batches(name: str):
    for case in cases(OPERATORS[name]):
        for axis, (pattern, is_batched) in zip((0, -1, 0), PATTERNS.items(), strict=True):
            batched = [is_batched(i) for i in range(len(case.tensors))]
            if not any(batched):
                continue
            rows = rows_of(case, is_batched)
            in_axes = tuple(axis if b else None for b in batched)
            columns = columns_of(rows, batched, axis)
            wanted = expected(case, rows)
            if wanted is not None:
                compare(jax.vmap(jtbridge.wrap(case.__call__), in_axes)(*columns), wanted, f"values, {pattern}")
            wanted = (
                expected(case.gradient, rows) if case.differentiated and OPERATORS[name].supports_autograd else None
            )
            if wanted is not None:
                gradient = jax.grad(jtbridge.wrap(case.loss), case.differentiated)
                compare(jax.vmap(gradient, in_axes)(*columns), wanted, f"gradients, {pattern}")


@pytest.mark.parametrize("name", [name for name, op in OPERATORS.items() if op.supports_autograd])
def test_batches_of_cotangents(name: str):
    """`vmap` over the cotangents alone, as `jax.jacrev` does it."""
    if name in ("as_strided_scatter", "to_sparse"):
        pytest.skip("its gradient is wrong in torch, or its result is sparse")
    for case in cases(OPERATORS[name]):
        at = case.differentiated
        given = [x.clone().requires_grad_(i in at) for i, x in enumerate(case.tensors)]
        try:
            results = case(*given)
            used = [i for i, y in enumerate(results) if y.requires_grad and y.dtype in (torch.float32, torch.float64)]
            cotangents = [torch.randn(ROWS, *results[i].shape, dtype=results[i].dtype) for i in used]
            rows = [
                torch.autograd.grad(
                    [results[i] for i in used],
                    [given[i] for i in at],
                    [ct[row] for ct in cotangents],
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
                for row in range(ROWS)
            ]
        except (RuntimeError, TypeError, ValueError):
            continue
        if not used:
            continue
        arrays = [jnp.asarray(x.numpy()) for x in case.tensors]

        def of_differentiated(*values: jax.Array, case=case, arrays=arrays, used=used) -> list[jax.Array]:
            tensors = dict(zip(case.differentiated, values, strict=True))
            results = jtbridge.wrap(case.__call__)(*(tensors.get(i, x) for i, x in enumerate(arrays)))
            return [results[i] for i in used]

        pullback = jax.vjp(of_differentiated, *(arrays[i] for i in at))[1]
        found = jax.vmap(pullback)([jnp.asarray(ct.numpy()) for ct in cotangents])
        wanted = [torch.stack([x.to_dense() for x in column]).numpy() for column in zip(*rows, strict=True)]
        compare(found, wanted, "gradients")


def compare(found: Sequence[jax.Array], wanted: Sequence[np.ndarray], what: str) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-8, err_msg=what)
        assert ours.dtype == theirs.dtype, what


def test_most_operators_are_tested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tried = [name for name, op in OPERATORS.items() if cases(op)]
    assert len(tried) > 400
