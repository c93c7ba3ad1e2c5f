"""Scattered writes and reductions."""

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge

from .harness import check

_INDEX = torch.tensor([[0, 2, 0], [1, 0, 0]])


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_reductions(dtype, reduce, include_self):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 9, (3, 4), generator=generator).to(dtype)
    src = torch.randint(0, 9, (2, 5), generator=generator).to(dtype)
    check(lambda x, i, s: x.scatter_reduce(0, i, s, reduce, include_self=include_self), x, _INDEX, src)
    if reduce != "sum":
        index = torch.tensor([2, 0, 2])
        source = torch.randint(0, 9, (3, 3), generator=generator).to(dtype)
        check(lambda x, i, s: x.index_reduce(1, i, s, reduce, include_self=include_self), x, index, source)


def test_means_of_negative_integers_are_rounded_down():
    check(
        lambda x, s: x.scatter_reduce(0, torch.tensor([0, 0]), s, "mean"), torch.tensor([-4, 1]), torch.tensor([-2, -2])
    )


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_gradients_of_reductions(reduce, include_self):
    x = torch.tensor([[1.0, 2.0, 3.0], [3.0, 0.0, 1.0], [2.0, 2.0, 2.0]])
    src = torch.tensor([[1.0, 2.0, 4.0], [3.0, 2.0, 4.0]])
    check(lambda x, s: x.scatter_reduce(0, _INDEX, s, reduce, include_self=include_self), x, src, grad=True)


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_nan_propagates_through_extremes(reduce):
    src = torch.tensor([torch.nan, 1.0, torch.inf])
    check(lambda x, s: x.scatter_reduce(0, torch.tensor([0, 0, 1]), s, reduce), torch.zeros(3), src)


def test_booleans():
    index = torch.tensor([0, 0, 1, 1, 2])
    src = torch.tensor([True, True, False, True, False])
    for x in (torch.zeros(3).bool(), torch.ones(3).bool()):
        check(lambda x, s: x.scatter_add(0, index, s), x, src)
        check(lambda x, s: x.index_add(0, index, s), x, src)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i, s: x.scatter(0, i, s[:2]),
        lambda x, i, s: x.scatter(-1, i[:1], s[:1]),
        lambda x, i, s: x.scatter(0, i[:, :0], s[:2, :0]),
        lambda x, i, s: x.scatter(0, i, 7),
        lambda x, i, s: x.scatter_add(1, i, s[:2]),
        lambda x, i, s: x.index_copy(0, i[0], s),
        lambda x, i, s: x.index_add(-1, i[0], s.t(), alpha=-2),
        lambda x, i, s: x.index_fill(1, i[0] - 3, 3),
        lambda x, i, s: x.sum().scatter(0, i[0, 0] * 0, s[0, 0]),
        lambda x, i, s: x.sum().index_add(0, i[0, :1] * 0, s[0, 0]),
        lambda x, i, s: x.sum().index_fill(0, i[0, :1] * 0, 4.0),
        lambda x, i, s: x.sum().index_copy(0, i[0, :1] * 0, s[0, 0]),
        lambda x, i, s: x.sum().scatter_reduce(0, i[0, :1] * 0, s[0, :1], "mean"),
    ],
)
def test_writes(function):
    check(function, torch.randn(3, 3), torch.tensor([[2, 0, 1], [0, 1, 2]]), torch.randn(3, 3), grad=True)


def test_sources_larger_than_the_index():
    index = torch.tensor([[2, 0]])
    x, src = torch.randn(3, 3), torch.randn(4, 3)
    check(lambda x, s: x.scatter(0, index, s), x, src)
    check(lambda x, s: x.scatter_add(-1, index, s), x, src)
    check(lambda x, s: x.scatter_reduce(-1, index, s, "amax"), x, src)
    check(lambda x, s: x.scatter(0, index[:, :0], s), x, src)


def test_filling_with_a_tensor():
    check(lambda x, v: x.index_fill(1, torch.tensor([0, -1]), v), torch.randn(2, 3), torch.tensor(2.5))


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter:UserWarning")
@pytest.mark.parametrize("reduce", ["add", "multiply"])
def test_old_names_of_reductions(reduce):
    index = torch.tensor([[0, 2, 0]])
    check(lambda x, s: x.scatter(1, index, s, reduce=reduce), torch.randn(2, 3), torch.randn(2, 4))
    check(lambda x: x.scatter(1, index, 3.0, reduce=reduce), torch.randn(2, 3))


_EXPANDED = {
    "last axis": (lambda i: i[:, :, None].expand(-1, -1, 4), 1),
    "last axes": (lambda i: i[:, :1, None].expand(-1, 3, 4), 0),
    "first axis": (lambda i: i.mT[None].expand(2, -1, -1)[:, :3], 2),
    "axis of the index": (lambda i: i[:, :1, None].expand(-1, 3, 4), 1),
    "axes on both sides": (lambda i: i[:1, :, None].expand(2, -1, 4), 1),
    "a part of an axis": (lambda i: i[:, :, None].expand(-1, -1, 2), 1),
    "new axes": (lambda i: i[0, :, None].expand(2, 3, 4), 1),
    "no axis": (lambda i: i[:, :, None].expand(-1, -1, 1), 1),
}


@pytest.mark.parametrize("name", _EXPANDED)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, d, i, s: x.gather(d, i),
        lambda x, d, i, s: x.scatter_add(d, i, s),
        lambda x, d, i, s: x.scatter_reduce(d, i, s, "mean", include_self=False),
        lambda x, d, i, s: x.scatter_reduce(d, i, s, "amax", include_self=False),
        lambda x, d, i, s: x.scatter_reduce(d, i, s, "prod"),
        lambda x, d, i, s: x.scatter(d, i, 3.0),
    ],
)
def test_expanded_indices(name, function):
    expanded, dim = _EXPANDED[name]
    index = torch.tensor([[1, 0, 1], [0, 1, 1]])
    source = torch.randn(expanded(index).shape)
    check(lambda x, i, s: function(x, dim, expanded(i), s), torch.randn(2, 3, 4), index, source, grad=True)


@pytest.mark.parametrize("wrong", [7, -1])
def test_expanded_indices_out_of_range(wrong):
    def reduced(x, i, s):
        return x.scatter_reduce(0, i[:, None].expand_as(s), s, "sum"), x.gather(0, i[:, None].expand_as(s))

    x, source = jnp.ones((3, 4)), jnp.ones((2, 4))
    result, read = jax.jit(jtbridge.wrap(reduced))(x, jnp.array([0, wrong]), source)
    assert jnp.isnan(result).all()
    assert not jnp.isnan(read[0]).any()
    assert jnp.isnan(read[1]).all()
