"""Tables of rows and bags of them."""

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.nn import functional

import jtbridge

from .harness import check

_TABLE = torch.tensor([[1.0, 5.0], [-3.0, 5.0], [2.0, -1.0], [4.0, 0.5], [0.0, 0.0]])
_ROWS = torch.tensor([1, 2, 1, 0, 3, 3])
_bag = torch.ops.aten._embedding_bag.default
_OFFSETS = torch.tensor([0, 3, 3, 5])


@pytest.mark.parametrize("padding", [None, 1, -2])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_embedding(padding, by_frequency):
    check(
        lambda w, i: functional.embedding(i, w, padding, scale_grad_by_freq=by_frequency),
        _TABLE,
        _ROWS.reshape(2, 3),
        grad=True,
    )


def test_embedding_of_no_rows():
    check(lambda w, i: functional.embedding(i, w), _TABLE, torch.zeros((2, 0), dtype=torch.int64), grad=True)


@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
def test_embedding_with_bounded_norms(norm):
    def function(w, i):
        w = w.clone()
        return functional.embedding(i, w, max_norm=3.0, norm_type=norm), w

    check(function, _TABLE, _ROWS)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_embedding_bag(mode, last, padding, dtype):
    def function(w, i, o):
        return functional.embedding_bag(i, w, o, mode=mode, include_last_offset=last, padding_idx=padding)

    offsets = torch.cat([_OFFSETS, torch.tensor([6])]) if last else _OFFSETS
    check(function, _TABLE.to(dtype), _ROWS, offsets, grad=True)


@pytest.mark.parametrize("offsets", [[0, 2, 5], [0, 0, 3], [0, 4, 6]])
@pytest.mark.parametrize("padding", [None, 0, 2])
def test_the_maximum_of_a_bag_with_nan(offsets, padding):
    """Torch ignores a NaN after the first row of a bag, and so does the gradient."""
    table = torch.randn(4, 3)
    table[0, 0] = table[2, 1] = table[1, 2] = table[2, 2] = float("nan")
    rows = torch.tensor([0, 1, 2, 3, 2, 1])

    def function(w):
        return functional.embedding_bag(rows, w, torch.tensor(offsets), mode="max", padding_idx=padding)

    check(function, table, grad=True)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_after_the_end_of_the_last_bag(mode, padding, dtype):
    """Their gradient is not compared: torch's gradient is uninitialised memory."""

    def function(w, i, o):
        return functional.embedding_bag(i, w, o, mode=mode, include_last_offset=True, padding_idx=padding)

    check(function, _TABLE.to(dtype), _ROWS, torch.tensor([0, 2, 4]))


def test_the_gradient_of_rows_after_the_end_of_the_last_bag():
    rows = jnp.array([1, 2, 1, 0, 3, 4])

    def total(w):
        return functional.embedding_bag(rows_, w, torch.tensor([0, 2, 4]), mode="sum", include_last_offset=True).sum()

    rows_ = jtbridge.to_torch(rows)
    gradient = jax.jit(jax.grad(jtbridge.wrap(total)))(jnp.asarray(_TABLE))
    assert gradient[:, 0].tolist() == [1.0, 2.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(
    ("rows", "offsets", "bad"),
    [
        ([0, 1, 2, 3], [1, 3], [True, True]),
        ([0, 1, 2, 3], [0, 9], [True, True]),
        ([0, 5, 2, 3], [0, 2], [True, False]),
        ([2, -1, 2, 7], [0, 2], [True, True]),
    ],
)
def test_bags_that_torch_refuses_give_nan(mode, rows, offsets, bad):
    f = jtbridge.wrap(lambda w, i, o: functional.embedding_bag(i, w, o, mode=mode))
    arguments = jnp.asarray(_TABLE), jnp.array(rows), jnp.array(offsets)
    with pytest.raises(RuntimeError):
        f(*arguments)
    assert jnp.isnan(jax.jit(f)(*arguments)).any(1).tolist() == bad


def test_all_results_of_embedding_bag():
    for mode in (0, 1, 2):
        check(lambda w, i, o, m=mode: torch.embedding_bag(w, i, o, mode=m), _TABLE, _ROWS.int(), _OFFSETS.int())
        check(lambda w, i, o, m=mode: _bag(w, i, o, False, m, False, None, False, 1), _TABLE, _ROWS, _OFFSETS)


@pytest.mark.parametrize("padding", [None, 1])
def test_embedding_bag_with_weights_of_samples(padding):
    def function(w, s, i):
        return functional.embedding_bag(i, w, _OFFSETS, mode="sum", per_sample_weights=s, padding_idx=padding)

    check(function, _TABLE, torch.randn(6), _ROWS, grad=True)


def test_embedding_bag_of_a_matrix_of_rows():
    check(lambda w, i: functional.embedding_bag(i, w), _TABLE, _ROWS.reshape(2, 3), grad=True)


def test_embedding_bag_scales_gradients_by_frequency():
    rows = torch.tensor([0, 0, 1, 1, 0, 1])  # few distinct rows, because torch's CPU kernel divides others wrongly
    offsets = torch.tensor([0, 3, 3, 5])
    check(
        lambda w, i: functional.embedding_bag(i, w, offsets, scale_grad_by_freq=True, mode="sum"),
        _TABLE,
        rows,
        grad=True,
    )
