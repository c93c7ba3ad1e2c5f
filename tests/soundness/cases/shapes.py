"""Shapes that depend on data."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch import nn

from ._case import ROWS, V, case


@case("shapes", "xla")
def nonzero_and_index_add(run):
    def f(v):
        index = torch.nonzero(v > 2).squeeze(1)
        return torch.zeros(4).index_add(0, index, v[index])

    yield run(run.wrap(f), V)


@case("shapes", "xla")
def sum_of_a_selection(run):
    f = run.wrap(lambda v: v[v > 2].sum())
    yield run(f, V)
    yield run.grad(f, V)


@case("shapes", "xla")
def number_of_unique_values(run):
    yield run(run.wrap(lambda v: v * torch.unique(v.floor()).numel()), V)


@case("shapes", "xla")
def least_squares(run):
    a = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.5, 4.0], [2.0, 2.0]])
    yield run(run.wrap(lambda v: torch.linalg.lstsq(a, v[:, None]).solution), V)


@case("shapes", "xla")
def selection_written_back(run):
    def f(v):
        y = v.clone()
        y[v > 2] = v[v > 2] * 10
        return y

    yield run(run.wrap(f), V)
    yield run.grad(run.wrap(f), V)


@case("shapes", "xla")
def repeat_interleave_by_an_argument(run):
    yield run(run.wrap(lambda n: torch.arange(3).repeat_interleave(n).sum()), torch.tensor([1, 0, 2]))


@case("shapes", "xla")
def packed_sequence(run):
    torch.manual_seed(0)
    rnn = nn.GRU(2, 3, batch_first=True)

    def f(x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(rnn(packed)[0], batch_first=True, total_length=3)[0]

    yield run(run.wrap(f), torch.arange(12.0).reshape(2, 3, 2) / 12, torch.tensor([1, 3]))


@case("shapes", "xla")
def experts_by_token(run):
    weights = torch.stack([torch.eye(2) * (i + 1) for i in range(3)])

    def f(x, choice):
        y = torch.zeros_like(x)
        for i in range(3):
            index = torch.where(choice == i)[0]
            y[index] += x[index] @ weights[i]
        return y

    yield run(run.wrap(f), torch.arange(8.0).reshape(4, 2), torch.tensor([0, 2, 2, 1]))


@case("shapes", "xla")
def mined_pairs(run):
    def f(v):
        i, j = torch.where((v[:, None] - v[None]).abs() > 1.5)
        return (v[i] - v[j]).square().mean()

    yield run(run.wrap(f), V)
    yield run.grad(run.wrap(f), V)


@case("shapes")
def embeddings_by_token_value(run):
    def f(ids, images):
        table = torch.arange(10.0).reshape(5, 2)
        y = table[ids]
        y[ids == 4] = images
        return y

    yield run(run.wrap(f), torch.tensor([0, 4, 1, 4]), torch.full((2, 2), -1.0))


@case("shapes", "jit")
def selection_is_the_result(run):
    yield run(run.wrap(lambda v: v[v > 2]), V)


@case("shapes", "jit")
def nonzero_is_the_result(run):
    yield run(run.wrap(lambda v: v.nonzero()), V)


@case("shapes", "jit")
def gradient_of_a_selection(run):
    f = run.wrap(lambda v: v[v > 2])
    yield run.grad(f, V)


@case("shapes")
def mask_of_a_constant(run):
    mask = torch.tensor([True, False, True, True])
    yield run(run.wrap(lambda v: v[mask] * 2), V)


@case("shapes")
def assertion_that_holds(run):
    def f(v):
        torch._assert((v > 0).all(), "positive")
        assert v.shape[0] == 4
        return v * 2

    yield run(run.wrap(f), V)


@case("shapes")
def deepcopy_inside(run):
    yield run(run.wrap(lambda v: copy.deepcopy(v) * 2), V)


@case("shapes")
def reentrant_checkpoint(run):
    f = run.wrap(lambda v: torch.utils.checkpoint.checkpoint(torch.sin, v, use_reentrant=True))
    yield run(f, V)


@case("shapes")
def attribute_converted_in_forward(run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = torch.ones(4)

        def forward(self, v):
            self.c = self.c.to(v.dtype)
            return v * self.c

    yield run(run.wrap(Net()), V)


@case("shapes")
def fake_quantization(run):
    f = run.wrap(lambda v: torch.fake_quantize_per_tensor_affine(v, 0.3, 0, 0, 10))
    yield run(f, V)
    yield run.grad(f, V)
    yield run.vmap(f, ROWS)


@case("shapes")
def fake_quantization_of_channels(run):
    zero = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    f = run.wrap(lambda v, s: torch.fake_quantize_per_channel_affine(v, s, zero, 1, 0, 10))
    yield run(f, ROWS, V / 7)
    g = run.wrap(lambda v, s: torch._fake_quantize_learnable_per_channel_affine(v, s, zero.float(), 1, 0, 10, 1.0))
    yield run.grad(g, ROWS, V / 7)


@case("shapes")
def distances_forward(run):
    f = run.wrap(lambda v: torch.cdist(v[:, None], v[:, None] + 9)[0])
    yield run.jacfwd(f, V)


@case("shapes")
def batch_norm_with_buffers_as_arguments(run):
    x = torch.stack([V, V.sin(), V * V])

    def f(x, mean, variance):
        return F.batch_norm(x, mean, variance, training=True).sin() * x.cos()

    # Torch refuses buffers that require a gradient; to JAX they are arguments like others, with a gradient of zero.
    if run.is_torch:
        gradients = [*run.grad(lambda x: f(x, torch.zeros(4), torch.ones(4)), x), torch.zeros(4), torch.zeros(4)]
    else:
        gradients = run.grad(run.wrap(f), x, torch.zeros(4), torch.ones(4))
    yield gradients


@case("shapes")
def transposed_linear_function(run):
    f = run.wrap(lambda v: 2 * v.flip(0).cumsum(0))
    yield run.either(
        lambda: run.grad(lambda v: (2 * v.flip(0).cumsum(0)) * V, V)[0],
        lambda: jax.linear_transpose(f, jnp.ones(4))(jnp.asarray(V.numpy()))[0],
    )


@case("shapes")
def wrapped_inside_wrapped(run):
    inner = run.wrap(lambda v: v.sin())
    f = run.wrap(lambda v: inner(v) * 2)
    yield run(f, V)
    yield run.grad(f, V)
    yield run(run.wrap(run.wrap(torch.cos)), V)


@case("shapes", "eager", "jit")
def coroutine_function(run):
    async def f(v):
        return v

    yield run.either(lambda: torch.zeros(()), lambda: run.wrap(f)(jnp.zeros(())))
