"""Reading and writing by index tensors and masks."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import DataDependentShapeError

from .harness import check

_I = torch.tensor([[2, 0, -1], [1, -3, 1]])
_index = torch.ops.aten.index.Tensor
_put = torch.ops.aten.index_put.default


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x[i],
        lambda x, i: x[:, i],
        lambda x, i: x[i, :, i],
        lambda x, i: x[:, i, i[:1]],
        lambda x, i: x[i[:, :, None], i[:, None]],
        lambda x, i: _index(x, [i[0, 0]]),
        lambda x, i: _index(x, [None, i[0, 0], None, i[1, 1]]),
        lambda x, i: _index(x, [i[0, 0], None, i[1, 1]]),
        lambda x, i: _index(x, [i[0, 0], i]),
        lambda x, i: x[1, :, i],
        lambda x, i: x[None, i, 1:, ..., 0],
        lambda x, i: torch.take(x, i * 7),
        lambda x, i: torch.ops.aten._unsafe_index.Tensor(x, [None, i]),
    ],
)
def test_reading_by_indices(function):
    check(function, torch.randn(3, 3, 4, 3), _I, grad=True)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("indices", "shape"),
    [
        (lambda i: [i], (2, 3, 1, 4)),
        (lambda i: [None, i], (4,)),
        (lambda i: [i, None, i], (2, 3, 3)),
        (lambda i: [i[0, 0]], (3, 4)),
        (lambda i: [i[0, 0], None, i[0, 1]], (3,)),
        (lambda i: [None, i[0, 0], i[0, 1]], ()),
    ],
)
def test_writing_by_indices(indices, shape, accumulate):
    index = torch.tensor([[2, 0, -1], [1, -3, 1]]) if accumulate else torch.tensor([[2, 0, 1]])
    shape = (1, *shape[1:]) if not accumulate and shape[:1] == (2,) else shape
    check(
        lambda x, i, v: _put(x, indices(i), v, accumulate), torch.randn(3, 3, 4), index, torch.randn(shape), grad=True
    )


def test_writing_accumulates_booleans():
    index = torch.tensor([1, 1, 1, 0])
    check(
        lambda x, v: x.index_put([index], v, True),
        torch.tensor([False, False, True]),
        torch.tensor([True, False, True, False]),
    )


def test_sums_of_half_precision_are_rounded_once():
    ones = jnp.ones(4096, jnp.bfloat16)  # torch on a CPU rounds after each addition, and stops growing at 256
    function = jtbridge.wrap(lambda v: v.new_zeros(2).index_put([torch.zeros(4096).long()], v, True), backend="xla")
    assert function(ones)[0] == 4096


@pytest.mark.parametrize("accumulate", [False, True])
def test_writing_by_a_mask(accumulate):
    mask = torch.tensor([[True, False, True], [False, False, True]])
    for shape in [(), (3, 4), (1, 4), (4,), (3, 1)]:
        check(lambda x, m, v: _put(x, [m], v, accumulate), torch.randn(2, 3, 4), mask, torch.randn(shape))
    check(lambda x, m, v: _put(x, [None, m], v, accumulate), torch.randn(4, 2, 3), mask, torch.randn(4, 3))


def test_assigning_to_a_mask():
    def function(x):
        x = x.clone()
        x[x < 0] = 0.0
        return x

    check(function, torch.randn(3, 4), grad=True)


def test_reading_by_a_mask_is_refused():
    with pytest.raises(DataDependentShapeError):
        check(lambda x: x[x > 0], torch.randn(3))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x.gather(1, i),
        lambda x, i: x.gather(-1, i[:1]),
        lambda x, i: x.gather(0, i[:, :2]),
        lambda x, i: x.gather(0, i[:0]),
        lambda x, i: x.index_select(-1, i[1]),
        lambda x, i: x.index_select(0, i[0, 0]),
        lambda x, i: x.index_select(0, i[0, :0]),
        lambda x, i: x.sum().index_select(0, i[0, 1:2]),
        lambda x, i: x.sum().gather(0, i[0, 1]),
    ],
)
def test_gather_and_index_select(function):
    check(function, torch.randn(3, 3), torch.tensor([[2, 0, 1], [1, 1, 1]]), grad=True)


@pytest.mark.parametrize("accumulate", [False, True])
def test_put(accumulate):
    index = torch.tensor([[5, -1], [0, 2]])
    check(lambda x, v: torch.put(x, index, v, accumulate), torch.randn(2, 3), torch.randn(2, 2), grad=True)


def test_masked_scatter():
    mask = torch.tensor([[True], [False], [True]])
    check(lambda x, m, v: x.masked_scatter(m, v), torch.randn(3, 4), mask, torch.randn(9), grad=True)
    check(lambda x, m, v: torch.masked_scatter(x, m, v), torch.randn(2), mask, torch.randn(3, 3))
    check(lambda x, m, v: x.masked_scatter(m, v), torch.randn(3), torch.zeros(3).bool(), torch.randn(0))


def test_unsafe_masked_index():
    mask, index = torch.tensor([True, False, True, False]), torch.tensor([2, 99, 0, -99])
    x, values = torch.randn(3, 2), torch.randn(4, 2)
    function = torch.ops.aten._unsafe_masked_index.default
    check(lambda x, m, i: function(x, m[:, None], [i], 7.0), x, mask, index, grad=True)
    put = torch.ops.aten._unsafe_masked_index_put_accumulate.default
    check(lambda x, m, i, v: put(x, m[:, None], [i], v), x, mask, index, values)


@pytest.mark.parametrize(("size", "fill"), [(2, -1), (6, -1), (6, 9), (0, -1)])
def test_nonzero_static(size, fill):
    x = torch.tensor([[0.0, 1.0, torch.nan], [-0.0, 2.0, 0.0]])
    for value in (x, x[:, :0], x[0, 1]):
        check(lambda x: torch.nonzero_static(x, size=size, fill_value=fill), value)


def test_repeat_interleave():
    repeats = torch.tensor([2, 0, 3])
    check(lambda x, r: torch.repeat_interleave(x, r, 1, output_size=5), torch.randn(2, 3), repeats, grad=True)
    check(lambda r: torch.repeat_interleave(r, output_size=5), repeats.int())
    with pytest.raises(DataDependentShapeError):
        check(torch.repeat_interleave, repeats)


def test_out_of_range_reads_give_nan():
    index = jnp.array([0, 5])
    for function in (lambda x, i: x[i], lambda x, i: x.index_select(0, i), lambda x, i: x.gather(0, i), torch.take):
        got = jtbridge.wrap(function, backend="xla")(jnp.ones(3), index)
        assert got[0] == 1
        assert jnp.isnan(got[1])


def put(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[mask] = values
    return x


def put_accumulated(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return x.index_put((mask,), values, accumulate=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
@pytest.mark.parametrize("chosen", [0, 2])
@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("fn", [put, put_accumulated, torch.Tensor.masked_scatter])
def test_masked_writes_of_a_wrong_number_of_values_are_detected(fn, count: int, chosen: int, dtype: torch.dtype):
    x, mask = torch.arange(4).to(dtype), torch.arange(4) < chosen
    values = torch.arange(7, 7 + count).to(dtype)
    got = jtbridge.wrap(fn, backend="xla", int32="keep")(*map(jtbridge.to_jax, (x, mask, values)))
    try:
        want = fn(x, mask, values).tolist()
    except RuntimeError:
        want = [math.nan if dtype.is_floating_point else -(2**31)] * 4
    np.testing.assert_array_equal(got, want)
