"""Rotary embedding as models write it is one operator, which is its own gradient, where it is just that."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge

from .harness import (
    DTYPES,
    assert_is_torchs,
    assert_left_alone,
    assert_near,
    gradient_operators,
    loss,
    normal,
    operators,
    to_torch,
)


def arguments(dtype="float32", batch=2):
    q, k = normal(2, 4, 5, 8, dtype=dtype), normal(2, 2, 5, 8, dtype=dtype, seed=1)
    return q, k, *(normal(batch, 5, 8, dtype=dtype, seed=2 + i) for i in range(2))


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def llama(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def gpt_neox(q, k, cos, sin):
    """Of a part of the dimensions."""
    q, k = torch.cat((q, q + 1), -1), torch.cat((k, k + 1), -1)
    d = cos.shape[-1]
    turned = llama(q[..., :d], k[..., :d], cos, sin)
    return tuple(torch.cat((y, x[..., d:]), -1) for x, y in zip((q, k), turned, strict=True))


def other_order(q, k, cos, sin):
    cos, sin = cos[:, None], sin[:, None]
    return tuple(sin * rotate_half(x) + cos * x for x in (q, k))


def of_angles(q, k, cos, sin):
    """Angles without a gradient, as models make them."""
    with torch.no_grad():
        cos, sin = cos.cos(), sin.sin()
    return llama(q, k, cos, sin)


chains = pytest.mark.parametrize("chain", [llama, gpt_neox, other_order, of_angles])


@chains
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2])
def test_the_chain_is_one_operator_and_torchs(chain, dtype, batch):
    given = arguments(dtype, batch)
    assert operators(chain, *given) == {"jtbridge.rope": 2}
    assert gradient_operators(chain, *given)["jtbridge.rope"] in (2, 4)  # the gradient may need no values
    assert_is_torchs(chain, *given, second=True)


@chains
def test_every_mode_of_differentiation(chain):
    f, given = loss(jtbridge.wrap(chain, backend="xla")), arguments()
    along = tuple(normal(*x.shape, seed=9) for x in given)

    def slope(*args):
        return jax.jvp(f, args, along)[1]

    reverse = jax.grad(
        lambda *args: sum((g * v).sum() for g, v in zip(jax.grad(f, (0, 1, 2, 3))(*args), along, strict=True)), (0, 2)
    )
    for a, b in zip(reverse(*given), jax.grad(slope, (0, 2))(*given), strict=True):
        assert jnp.allclose(a, b, atol=1e-5)
    rows = tuple(jnp.stack([x, x + 1]) for x in given)
    q, k = jax.vmap(jtbridge.wrap(chain, backend="xla"))(*rows)
    want = [chain(*row) for row in zip(*to_torch(rows), strict=True)]
    assert_near([q, k], [torch.stack(column) for column in zip(*want, strict=True)])


def test_angles_without_a_gradient_keep_no_queries():
    """What the backward keeps of the queries is nothing."""
    from jtbridge.capture import split

    plan, _ = jtbridge.wrap(of_angles, backend="xla").prepared(arguments(), {})
    found = split(plan, (0, 1), (0, 1), translated=True)
    assert not isinstance(found, str)
    assert not {0, 1} & set(found.sources)
    assert {y.shape for y in found.forward.out_types[2:]} <= {(2, 1, 5, 8), (2, 5, 8)}


# What looks like it and is not.


def turned_the_other_way(q, k, cos, sin):
    x1, x2 = q[..., :4], q[..., 4:]
    return q * cos[:, None] + torch.cat((x2, -x1), -1) * sin[:, None] + k.sum()


def of_unequal_parts(q, k, cos, sin):
    return q * cos[:, None] + torch.cat((-q[..., 2:], q[..., :2]), -1) * sin[:, None] + k.sum()


def of_another(q, k, cos, sin):
    return q * cos[:, None] + rotate_half(q + 1) * sin[:, None] + k.sum()


def of_two(q, k, cos, sin):
    other = q + 1
    turned = torch.cat((-other[..., 4:], q[..., :4]), -1)
    return q * cos[:, None] + turned * sin[:, None] + k.sum()


def along_heads(q, k, cos, sin):
    turned = torch.cat((-q[..., 4:], q[..., :4]), -1)
    return q * cos[:, :4, None] + turned * sin[:, :4, None] + k.sum()


def interleaved(q, k, cos, sin):
    turned = torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2)
    return q * cos[:, None] + turned * sin[:, None] + k.sum()


def angles_of_heads(q, k, cos, sin):
    return q * cos[:, None].expand(-1, 4, -1, -1) + rotate_half(q) * sin[:, None].expand(-1, 4, -1, -1) + k.sum()


def detached(q, k, cos, sin):
    return q * cos[:, None] + rotate_half(q).detach() * sin[:, None] + k.sum()


def turned_is_used(q, k, cos, sin):
    turned = rotate_half(q)
    return q * cos[:, None] + turned * sin[:, None] + turned.sin() + k.sum()


def with_alpha(q, k, cos, sin):
    return torch.add(q * cos[:, None], rotate_half(q) * sin[:, None], alpha=2) + k.sum()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "function",
    [
        turned_the_other_way,
        of_unequal_parts,
        of_another,
        of_two,
        along_heads,
        interleaved,
        angles_of_heads,
        detached,
        turned_is_used,
        with_alpha,
    ],
)
def test_a_near_miss_is_left_as_it_is(function, dtype):
    assert_left_alone(function, *arguments(dtype))


def test_angles_of_another_dtype():
    def f(q, k, cos, sin):
        return llama(q, k, cos.float(), sin.float())

    assert_left_alone(f, *arguments("bfloat16"))
