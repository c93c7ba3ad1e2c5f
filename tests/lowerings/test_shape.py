"""Views and copies where torch differs from jnp, or where dimensions, lengths and dtypes are special."""

import pytest
import torch

from .harness import check


def _numbers(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(-1, 4),
        lambda x: x.transpose(-1, 0),
        lambda x: x.permute(-1, 0, 1),
        lambda x: x[:1].squeeze(-3),
        lambda x: x.squeeze(1),
        lambda x: torch.squeeze(x[:1, :1], (0, 1)),
        lambda x: torch.squeeze(x[:1], ()),
        lambda x: x.unsqueeze(-1).unsqueeze(-4),
        lambda x: x.unsqueeze(0).expand(5, -1, 3, -1),
        lambda x: x.repeat(2, 1, 3, 1),
        lambda x: x.roll(5),
        lambda x: x.roll((1, -2, 2), (0, -1, 0)),
        lambda x: x.flip(-1, 0),
        lambda x: x.flip([]),
        lambda x: x.rot90(-1, (0, -1)),
        lambda x: x.movedim((0, -1), (-1, 0)),
        lambda x: list(x.split(3, dim=-1)),
        lambda x: list(x.split([1, 0, 3], dim=-1)),
        lambda x: list(x[:, :0].split(2, dim=1)),
        lambda x: list(x.unbind(-2)),
        lambda x: list(x.chunk(3, 2)),
        lambda x: torch.stack([x, -x], -1),
        lambda x: torch.block_diag(x[0, 0], x[1], x[0, 0, 0]),
        lambda x: torch.channel_shuffle(x.reshape(1, 6, 2, 2), 3),
        lambda x: torch.pixel_shuffle(x.reshape(4, 2, 3), 2),
        lambda x: torch.pixel_unshuffle(x.reshape(2, 1, 2, 6), 2),
    ],
)
def test_elements_are_moved_as_torch_does(function):
    check(function, _numbers(2, 3, 4), grad=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.transpose(0, -1),
        lambda x: x.permute(()),
        lambda x: x.squeeze(0),
        lambda x: x.unsqueeze(-1),
        lambda x: x.flip([]),
        lambda x: x.roll(3),
        lambda x: x.expand(2, 3),
        lambda x: x.repeat(2),
        lambda x: x.t(),
    ],
)
def test_arrays_without_dimensions(function):
    check(function, torch.tensor(3.0))


def test_chunks_of_several_tensors_are_joined():
    check(lambda x: torch._chunk_cat([x, x[:1], x[:, :1]], 0, 2), _numbers(3, 2, 2))
    check(lambda x: torch._chunk_cat([x, x[:, :1]], 1, 3), _numbers(3, 4))


def test_cat_promotes_and_skips_empty_vectors():
    check(
        lambda x, y, z: torch.cat([x, y, z], -1), _numbers(2, 3, dtype=torch.int32), _numbers(0), _numbers(2, 2) + 0.5
    )


def test_cat_of_empty_vectors_only():
    check(lambda x, y: torch.cat([x, y]), _numbers(0), _numbers(0, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64])
def test_copy_of_floats_into_integers_wraps(dtype):
    source = torch.tensor([-1.0, -1.5, 300.0, 2.9]) if dtype != torch.int64 else torch.tensor([-1.5, 3e9, 2.9])
    check(lambda x, y: torch.zeros_like(x).copy_(y), torch.zeros(source.shape, dtype=dtype), source)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_copy_of_complex_into_reals(dtype):
    source = torch.tensor([0j, 1j, 2 + 1j])
    check(lambda y: torch.ops.aten.copy.default(torch.zeros(2, 3, dtype=dtype), y), source)
