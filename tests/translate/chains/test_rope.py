"""Rotary embedding as models write it becomes one operator, also in the gradient; code like it does not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge
from jtbridge.capture.chains import CallRecorder

from .harness import (
    DTYPES,
    assert_matches_torch,
    assert_near,
    assert_not_fused,
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


def tokens_first(q, k, cos, sin):
    """As Gemma 3n has it, of [batch, tokens, heads, d]."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return tuple((x * cos) + (rotate_half(x) * sin) for x in (q.transpose(1, 2), k.transpose(1, 2)))


def rotate_neighbours(x):
    x1 = x[..., ::2]
    x2 = x[..., 1::2]
    return torch.stack([-x2, x1], dim=-1).flatten(-2)


def glm(q, k, cos, sin):
    """Of neighbours, in a part of the dimensions."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    cos, sin = (angle[..., : angle.shape[-1] // 2].repeat_interleave(2, dim=-1) for angle in (cos, sin))
    q, k = torch.cat((q, q + 1), -1), torch.cat((k, k + 1), -1)
    d = cos.shape[-1]
    rotated = [x[..., :d] for x in (q, k)]
    embedded = [(x * cos) + (rotate_neighbours(x) * sin) for x in rotated]
    return tuple(torch.cat((y, x[..., d:]), -1) for x, y in zip((q, k), embedded, strict=True))


def gptj(q, k, cos, sin):
    """Of neighbours, of [batch, tokens, heads, d]."""

    def rotate_every_two(x):
        x1 = x[:, :, :, ::2]
        x2 = x[:, :, :, 1::2]
        return torch.stack((-x2, x1), dim=-1).flatten(-2)

    cos, sin = (torch.repeat_interleave(angle[:, :, None, ::2], 2, 3) for angle in (cos, sin))
    return tuple((x * cos) + (rotate_every_two(x) * sin) for x in (q.transpose(1, 2), k.transpose(1, 2)))


def cohere(q, k, cos, sin):
    """In float32."""
    dtype, q, k = q.dtype, q.float(), k.float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = ((x * cos) + (rotate_neighbours(x) * sin) for x in (q, k))
    return q.to(dtype=dtype), k.to(dtype=dtype)


def ernie(q, k, cos, sin):
    """The neighbours are rotated before the conversion to float32."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return tuple(((x.float() * cos) + (rotate_neighbours(x).float() * sin)).to(x.dtype) for x in (q, k))


def in_float32(q, k, cos, sin):
    """By angles in float32 too."""
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    return tuple((x.float() * cos + rotate_half(x.float()) * sin).type_as(x) for x in (q, k))


def in_pairs(x):
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def llama4(q, k, cos, sin):
    """Of complex numbers, of [batch, tokens, heads, d]."""
    angles = torch.complex(cos.float(), sin.float())[..., :4]
    q, k = (x.transpose(1, 2).contiguous() for x in (q, k))
    return tuple(torch.view_as_real(in_pairs(x) * angles[:, :, None, :]).flatten(3).type_as(x) for x in (q, k))


def heads_of_complex(q, k, cos, sin):
    """Of [batch, heads, tokens, d], as DeepSeek V2 has it."""
    angles = torch.complex(cos.float(), sin.float())[:, None, :, ::2]
    return tuple(torch.view_as_real(angles * in_pairs(x)).flatten(-2).to(x.dtype) for x in (q, k))


CHAINS = [llama, gpt_neox, other_order, of_angles, tokens_first, glm, gptj, cohere, ernie, in_float32]
CHAINS += [llama4, heads_of_complex]
chains = pytest.mark.parametrize("chain", CHAINS)


@chains
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2])
def test_chain_is_fused_and_matches_torch(chain, dtype, batch):
    given = arguments(dtype, batch)
    assert operators(chain, *given) == {"jtbridge.rope": 2}
    assert gradient_operators(chain, *given)["jtbridge.rope"] in (2, 4)  # the gradient may need no values
    assert_matches_torch(chain, *given, second=True)


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


def test_backward_saves_no_queries_for_constant_angles():
    """No queries are saved for the backward."""
    from jtbridge.capture import split_or_reason

    traced, _ = jtbridge.wrap(of_angles, backend="xla").prepared(arguments(), {})
    found = split_or_reason(traced, (0, 1), (0, 1), translated=True)
    assert not isinstance(found, str)
    assert not {0, 1} & set(found.sources)
    assert {y.shape for y in found.forward.out_types[2:]} <= {(2, 1, 5, 8), (2, 5, 8)}


# Code that resembles the chain and computes something else.


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


def neighbours_the_other_way(q, k, cos, sin):
    turned = torch.stack((q[..., 1::2], -q[..., ::2]), -1).flatten(-2)
    return q * cos[:, None] + turned * sin[:, None] + k.sum()


def neighbours_swapped(q, k, cos, sin):
    turned = torch.stack((-q[..., ::2], q[..., 1::2]), -1).flatten(-2)
    return q * cos[:, None] + turned * sin[:, None] + k.sum()


def neighbours_as_halves(q, k, cos, sin):
    turned = torch.stack((-q[..., 1::2], q[..., ::2]), -2).flatten(-2)
    return q * cos[:, None] + turned * sin[:, None] + k.sum()


def halves_as_neighbours(q, k, cos, sin):
    turned = torch.stack((-q[..., 4:], q[..., :4]), -1).flatten(-2)
    return q * cos[:, None] + turned * sin[:, None] + k.sum()


def every_second_neighbour(q, k, cos, sin):
    turned = torch.stack((-q[..., 2::2], q[..., :6:2]), -1).flatten(-2)
    return q[..., :6] * cos[:, None, :, :6] + turned * sin[:, None, :, :6] + k.sum()


def neighbours_flattened_elsewhere(q, k, cos, sin):
    x = q[:, :, :4, :4]
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(2, 3).reshape(2, 4, 4, 4)
    return x * cos[:, None, :4, :4] + turned * sin[:, None, :4, :4] + k.sum()


def neighbours_are_used(q, k, cos, sin):
    turned = rotate_neighbours(q)
    return q * cos[:, None] + turned * sin[:, None] + turned.sin() + k.sum()


def angles_of_both(q, k, cos, sin):
    x = q[:, :, :4]
    square = cos[:, :4, None] * cos[:, None, :4]
    return x * square + rotate_half(x) * square.sin() + k.sum()


def angles_of_heads(q, k, cos, sin):
    return q * cos[:, None].expand(-1, 4, -1, -1) + rotate_half(q) * sin[:, None].expand(-1, 4, -1, -1) + k.sum()


def detached(q, k, cos, sin):
    return q * cos[:, None] + rotate_half(q).detach() * sin[:, None] + k.sum()


def turned_is_used(q, k, cos, sin):
    turned = rotate_half(q)
    return q * cos[:, None] + turned * sin[:, None] + turned.sin() + k.sum()


def with_alpha(q, k, cos, sin):
    return torch.add(q * cos[:, None], rotate_half(q) * sin[:, None], alpha=2) + k.sum()


def complex_sum(q, k, cos, sin):
    angles = torch.complex(cos.float(), sin.float())[:, None, :, ::2]
    return torch.view_as_real(in_pairs(q) + angles).flatten(3).type_as(q) + k.sum()


def complex_conjugate(q, k, cos, sin):
    angles = torch.complex(cos.float(), sin.float())[:, None, :, ::2]
    return torch.view_as_real((in_pairs(q).conj() * angles).resolve_conj()).flatten(3).type_as(q) + k.sum()


def complex_halves(q, k, cos, sin):
    angles = torch.complex(cos.float(), sin.float())[:, None, :, ::2]
    pairs = q.float().reshape(*q.shape[:-1], 2, -1).transpose(-1, -2).contiguous()
    return torch.view_as_real(torch.view_as_complex(pairs) * angles).flatten(3).type_as(q) + k.sum()


def complex_of_heads(q, k, cos, sin):
    angles = torch.complex(cos.float(), sin.float())[:, None, :, ::2].expand(-1, 4, -1, -1)
    return torch.view_as_real(in_pairs(q) * angles).flatten(3).type_as(q) + k.sum()


def complex_by_real(q, k, cos, sin):
    return torch.view_as_real(in_pairs(q) * cos.float()[:, None, :, ::2]).flatten(3).type_as(q) + k.sum()


def complex_by_itself(q, k, cos, sin):
    pairs = in_pairs(q)
    return torch.view_as_real(pairs * pairs).flatten(3).type_as(q) + k.sum()


def complex_flattened_elsewhere(q, k, cos, sin):
    angles = torch.complex(cos.float(), sin.float())[:, None, :, ::2]
    return torch.view_as_real(in_pairs(q) * angles).flatten(2, 3).type_as(q).sum(-2) + k.sum()


def complex_product_used(q, k, cos, sin):
    product = in_pairs(q) * torch.complex(cos.float(), sin.float())[:, None, :, ::2]
    return torch.view_as_real(product).flatten(3).type_as(q), product.abs(), k


def complex_of_other_rows(q, k, cos, sin):
    """The pairs are of two rows each."""
    x = q.transpose(2, 3).contiguous()
    pairs = torch.view_as_complex(x.float().reshape(2, 4, 5, 4, 2))
    return (
        torch.view_as_real(pairs * torch.complex(cos.float(), sin.float())[:, None, :, ::2]).flatten(3).type_as(x)
        + k.sum()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "function",
    [
        complex_sum,
        complex_conjugate,
        complex_halves,
        complex_of_heads,
        complex_by_real,
        complex_by_itself,
        complex_flattened_elsewhere,
        complex_product_used,
        complex_of_other_rows,
        turned_the_other_way,
        of_unequal_parts,
        of_another,
        of_two,
        neighbours_the_other_way,
        neighbours_swapped,
        neighbours_as_halves,
        halves_as_neighbours,
        every_second_neighbour,
        neighbours_flattened_elsewhere,
        neighbours_are_used,
        angles_of_both,
        angles_of_heads,
        detached,
        turned_is_used,
        with_alpha,
    ],
)
def test_similar_code_is_not_fused(function, dtype):
    assert_not_fused(function, *arguments(dtype))


def sum_is_used(q, k, cos, sin):
    total = q.float() * cos[:, None] + rotate_half(q.float()) * sin[:, None]
    return total.to(q.dtype), total.sin(), k


def rounded_elsewhere(q, k, cos, sin):
    return (q.float() * cos[:, None] + rotate_half(q.float()) * sin[:, None]).half(), k


def half_of_it_in_float32(q, k, cos, sin):
    return (q.float() * cos[:, None] + rotate_half(q) * sin[:, None]).to(q.dtype), k


def of_two_conversions(q, k, cos, sin):
    return (q.float() * cos[:, None] + rotate_half((q * 1).float()) * sin[:, None]).to(q.dtype), k


def complex_stays_in_float32(q, k, cos, sin):
    angles = torch.complex(cos.float(), sin.float())[:, None, :, ::2]
    return torch.view_as_real(in_pairs(q) * angles).flatten(3), k


def turned_is_used_in_float32(q, k, cos, sin):
    turned = rotate_neighbours(q).float()
    return (q.float() * cos[:, None] + turned * sin[:, None]).to(q.dtype), turned.sin(), k


@pytest.mark.parametrize(
    "function",
    [
        sum_is_used,
        rounded_elsewhere,
        half_of_it_in_float32,
        of_two_conversions,
        turned_is_used_in_float32,
        complex_stays_in_float32,
    ],
)
def test_similar_code_in_float32_is_not_fused(function):
    assert_not_fused(function, *arguments("bfloat16"))


def test_in_float32_without_a_conversion_back():
    """The converted tensor is rotated."""

    def f(q, k, cos, sin):
        return llama(*(x.float() for x in (q, k, cos, sin)))

    given = arguments("bfloat16")
    assert operators(f, *given) == {"jtbridge.rope": 2}
    assert_matches_torch(f, *given)


@pytest.mark.parametrize("chain", [llama, glm, gptj, tokens_first, cohere, ernie, in_float32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_operator_matches_the_chain(chain, dtype):
    """To the bit, in torch itself, and so are the gradients by queries and keys."""
    tensors = to_torch(arguments(dtype))
    q, k = (x.requires_grad_() for x in tensors[:2])
    want, recorder = chain(*tensors), CallRecorder(())
    with recorder:
        got = chain(*tensors)
    assert got[0].grad_fn.name().startswith(("Generated", "Cat"))
    cts = [torch.randn_like(y) for y in want]
    grads, wanted = (torch.autograd.grad(ys, (q, k), cts) for ys in (got, want))
    for a, b in zip((*got, *grads), (*want, *wanted), strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)


def test_angles_of_another_dtype():
    def f(q, k, cos, sin):
        return llama(q, k, cos.float(), sin.float())

    assert_not_fused(f, *arguments("bfloat16"))
