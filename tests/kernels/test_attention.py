"""attention in Triton's interpreter, compared with torch's and jnp's attention."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

import jtbridge
from jtbridge.kernels import attention
from jtbridge.kernels._attention import configurations, differentiable, op, reference, unsupported_reason
from jtbridge.kernels._attention.configurations import AttentionConfiguration
from jtbridge.kernels._attention.philox import philox
from jtbridge.kernels._launch import interpreting

from .harness import (
    assert_close,
    needs_interpreter,
    needs_triton,
    normal,
    on_host,
)

TABLES = (configurations.FORWARD, configurations.BACKWARD_QUERY, configurations.BACKWARD_KEY_VALUE)
CANDIDATES = [dict(table) for table in TABLES]
# The weights and their derivatives are rounded to the dtype between the products, and so is the result that the
# backward starts from.
BETWEEN = 4


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Use small blocks of queries and keys: little is interpreted, and lengths are not multiples of the blocks."""
    with pytest.MonkeyPatch.context() as patch:
        if interpreting():
            for table, block in zip(TABLES, [(32, 16), (16, 32), (16, 16)], strict=True):
                for entry in table:
                    patch.setitem(table, entry, (AttentionConfiguration(*block, 4, 2),))
        yield


def inputs(batch=2, heads=4, kv_heads=2, q_len=21, kv_len=37, d=20, dtype="float32"):
    """Return query, key, value, and a cotangent of the result."""
    of_query, of_key = (batch, heads, q_len, d), (batch, kv_heads, kv_len, d)
    return [normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate([of_query, of_key, of_key, of_query])]


def plain(query, key, value, mask=None, scale=None):
    """Compute attention by its formula."""
    key, value = (jnp.repeat(x, query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask
    return jax.nn.softmax(scores) @ value, jax.nn.logsumexp(scores, -1)


def window_mask(q_len, kv_len, left=None, right=None):
    ahead = np.arange(kv_len) - np.arange(q_len)[:, None]
    return (ahead >= -(q_len if left is None else left)) & (ahead <= (kv_len if right is None else right))


def theirs(query, key, value, ct, mask=None, seen=True, scale=None):
    """Return torch's result and gradients in double precision; a floating-point mask has a gradient too."""
    tensors = [on_host(x).double().requires_grad_() for x in (query, key, value)]
    whole = torch.tensor(seen)
    if mask is not None and mask.dtype == bool:
        whole = whole & on_host(mask)
    elif mask is not None:
        tensors.append(on_host(mask).double().requires_grad_())
        whole = torch.where(whole, tensors[3], -math.inf)
    whole = whole.expand(*query.shape[:3], key.shape[2])
    out = scaled_dot_product_attention(*tensors[:3], attn_mask=whole, scale=scale, enable_gqa=True)
    out.backward(on_host(ct).double())
    return [out.detach(), *(x.grad for x in tensors)]


def assert_results_near(got, want, factor=BETWEEN):
    """Compare relative to the largest number of all: a gradient may be 0 if a query sees only one key."""
    flat = [x.astype(got[0].dtype).ravel() for x in got]
    assert [x.shape for x in got] == [x.shape for x in want]
    expected = [jnp.asarray(x.numpy(), got[0].dtype).ravel() for x in want]
    assert_close(jnp.concatenate(flat), jnp.concatenate(expected), factor)


@settings(max_examples=5)
@given(
    lengths=st.tuples(st.sampled_from([1, 7, 16, 33, 50]), st.sampled_from([1, 9, 32, 47])),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    d=st.sampled_from([8, 32, 40]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    is_causal=st.booleans(),
    window=st.sampled_from([None, (3, 5), (None, 2), (20, None)]),
    mask=st.sampled_from(["none", "boolean", "additive"]),
    whole=st.tuples(*[st.booleans()] * 4),
    scale=st.sampled_from([None, 0.5, -0.3]),
)
@example((33, 47), (4, 2), 32, "float32", True, None, "additive", (True, True, True, True), None)
@example((50, 47), (3, 1), 40, "bfloat16", True, (20, None), "boolean", (True, False, False, True), None)
@example((7, 32), (1, 1), 8, "float16", False, (3, 5), "none", (False, False, False, False), -0.3)
def test_matches_torch(lengths, heads, d, dtype, is_causal, window, mask, whole, scale):
    q_len, kv_len = lengths
    query, key, value, ct = inputs(2, *heads, q_len, kv_len, d, dtype)
    shape = tuple(n if w else 1 for n, w in zip((2, heads[0], q_len, kv_len), whole, strict=True))
    noise = normal(*shape, seed=9)
    masks = {"none": [], "boolean": [noise > -0.8], "additive": [noise]}[mask]
    seen = window_mask(q_len, kv_len, *(window or ()))
    if is_causal:
        seen &= window_mask(q_len, kv_len, right=0)

    def ours(query, key, value, mask=None):
        return attention(query, key, value, mask=mask, is_causal=is_causal, window=window, scale=scale)

    got, pull = jax.vjp(ours, query, key, value, *masks)
    gradients = [x for x in pull(ct) if x.dtype != jax.dtypes.float0]
    assert_results_near([got, *gradients], theirs(query, key, value, ct, *(masks or [None]), seen, scale))


def test_is_causal_matches_torch():
    query, key, value, _ = inputs()
    tensors = [jtbridge.to_torch(x) for x in (query, key, value)]
    want = scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    assert_close(attention(query, key, value, is_causal=True), jtbridge.to_jax(want))


def test_logsumexp():
    query, key, value, ct = inputs()
    more = normal(*query.shape[:3], seed=4)
    mask = normal(2, 1, 21, 37, seed=5)

    def ours(query, key, value, mask):
        return attention(query, key, value, mask=mask, return_logsumexp=True)

    got, pull = jax.vjp(ours, query, key, value, mask)
    want, their_pull = jax.vjp(plain, query, key, value, mask)
    assert_close(got, want)
    assert_close(pull((ct, more)), their_pull((ct, more)), factor=2)
    assert (
        attention(*(x.astype(jnp.bfloat16) for x in (query, key, value)), return_logsumexp=True)[1].dtype == "float32"
    )


@pytest.mark.parametrize("kind", ["boolean", "additive", "window"])
def test_fully_masked_query_gets_0(kind):
    query, key, value, ct = inputs(q_len=40, kv_len=17)
    seen = window_mask(40, 17, left=3) if kind == "window" else normal(2, 1, 40, 17) > 0.5
    seen = jnp.asarray(seen).at[..., 5, :].set(False) if kind != "window" else jnp.asarray(seen)
    keywords = {
        "boolean": {"mask": seen},
        "additive": {"mask": jnp.where(seen, 0.0, -jnp.inf)},
        "window": {"window": (3, None)},
    }[kind]
    (out, logsumexp), pull = jax.vjp(lambda *x: attention(*x, **keywords, return_logsumexp=True), query, key, value)
    empty = jnp.broadcast_to(~seen.any(-1), logsumexp.shape)
    assert empty.any()
    assert not out[empty].any()
    assert not logsumexp[empty].any()
    gradients = pull((ct, jnp.ones_like(logsumexp)))
    assert not gradients[0][empty].any()
    assert all(jnp.isfinite(x).all() for x in gradients)
    assert_results_near([out, *pull((ct, 0 * logsumexp))], theirs(query, key, value, ct, seen=np.asarray(seen)))


def test_row_masked_with_the_lowest_number_attends_evenly():
    query, key, value, ct = inputs()
    mask = jnp.full((1, 1, 21, 37), jnp.finfo(jnp.float32).min).at[:, :, 1:].set(0)
    out, pull = jax.vjp(lambda *x: attention(*x, mask=mask), query, key, value)
    want, their_pull = jax.vjp(lambda *x: plain(*x, mask)[0], query, key, value)
    assert_close(out, want)
    ct = ct.at[:, :, 0].set(0)  # the logarithm of such a row's sum is lost, and so is its gradient, in torch too
    assert_close(pull(ct), their_pull(ct), factor=2)


KEY = jax.random.key(3)
# With queries of 0 all weights are equal, and values of 1 in one place show these weights.
EVEN = {"query": jnp.zeros((2, 4, 21, 37)), "key": jnp.zeros((2, 2, 37, 37))}
SHOWN = jnp.broadcast_to(jnp.eye(37), (2, 2, 37, 37))


def kept(key, rate=0.25):
    return attention(**EVEN, value=SHOWN, dropout_rate=rate, dropout_key=key)


def test_dropout_mask_matches_reference_forward_and_backward():
    weights, pull = jax.vjp(lambda value: attention(**EVEN, value=value, dropout_rate=0.25, dropout_key=KEY), SHOWN)
    want = reference.dropout(op._seeds(KEY, 2), 4, 21, 37, 2**30)
    np.testing.assert_array_equal(np.asarray(weights) > 0, want)
    assert_close(weights, jnp.where(want, 1 / 37 / 0.75, 0.0))
    ct = jnp.zeros((2, 4, 21, 37)).at[:, ::2, 5].set(1.0)
    backward = np.asarray(pull(ct)[0])[..., 0] > 0  # [batch, kv_heads, kv_len]
    np.testing.assert_array_equal(backward, np.asarray(want)[:, ::2, 5])


def test_dropout_differs_between_positions_and_keys():
    rows = np.asarray(kept(KEY) > 0).reshape(-1, 37)
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert abs(rows.mean() - 0.75) < 0.02
    np.testing.assert_array_equal(rows, np.asarray(kept(KEY) > 0).reshape(-1, 37))
    other = np.asarray(kept(jax.random.key(4)) > 0).reshape(-1, 37)
    assert abs((rows == other).mean() - (0.75**2 + 0.25**2)) < 0.03
    old = np.asarray(kept(jax.random.PRNGKey(3)) > 0).reshape(-1, 37)
    np.testing.assert_array_equal(rows, old)
    assert not kept(KEY, 1.0).any()


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_with_dropout(is_causal):
    query, key, value, ct = inputs()
    mask = normal(1, 4, 21, 37, seed=7)
    drop = reference.dropout(op._seeds(KEY, 2), 4, 21, 37, round(0.4 * 2**32))
    seen = jnp.asarray(window_mask(21, 37, right=0)) if is_causal else True

    def formula(query, key, value, mask):
        k, v = (jnp.repeat(x, 2, 1) for x in (key, value))
        scores = jnp.where(seen, jnp.einsum("bhqd,bhkd->bhqk", query, k) / math.sqrt(20.0) + mask, -jnp.inf)
        return jnp.where(drop, jax.nn.softmax(scores) / 0.6, 0.0) @ v

    ours = functools.partial(attention, is_causal=is_causal, dropout_rate=0.4, dropout_key=KEY)
    got, pull = jax.vjp(lambda q, k, v, m: ours(q, k, v, mask=m), query, key, value, mask)
    want, their_pull = jax.vjp(formula, query, key, value, mask)
    assert_close(got, want)
    assert_close(pull(ct), their_pull(ct), factor=2)


def test_philox_matches_published_values():
    zero, ones = jnp.uint32(0), jnp.uint32(0xFFFFFFFF)
    found = [[f"{int(x):08x}" for x in philox((w, w), w, w, w, w)] for w in (zero, ones)]
    assert found == [
        ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"],
        ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"],
    ]


@needs_triton
@needs_interpreter
def test_philox_matches_triton():
    import triton
    import triton.language as tl

    @triton.jit
    def integers(out_ptr, seed, first, n: tl.constexpr):
        at = tl.arange(0, n)
        tl.store(out_ptr + at, tl.randint(seed, first + at).to(tl.int32, bitcast=True))

    out = torch.zeros(64, dtype=torch.int32)
    integers[(1,)](out, 0x123456789ABCDEF, 2**31 - 32, 64)
    offset = np.uint32(2**31 - 32) + jnp.arange(64, dtype=jnp.uint32)
    seed = (jnp.uint32(0x89ABCDEF), jnp.uint32(0x1234567))
    want = philox(seed, offset, *[jnp.uint32(0)] * 3)[0]
    np.testing.assert_array_equal(out.numpy().view(np.uint32), want)


def test_vmap_agrees_with_a_loop_over_the_rows():
    query, key, value, _ = (jnp.stack([x, x[::-1]]) for x in inputs(heads=2, kv_heads=1, q_len=17, kv_len=18))
    keys = jax.random.split(KEY, 2)
    shared, own = normal(1, 1, 17, 18, seed=8), normal(2, 1, 1, 17, 18, seed=9)

    def loss(query, key, value, mask, drop, seen=None):
        out = attention(query, key, value, mask=mask, is_causal=True, dropout_rate=0.3, dropout_key=drop)
        return (out**2).sum() + (attention(query, key, value, mask=seen) ** 2).sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    seen = own > -1
    for axes, args in {
        (0, 0, 0, None, 0, 0): (query, key, value, shared, keys, seen),
        (0, None, 0, 0, None, None): (query, key[0], value, own, KEY, seen[0]),
    }.items():
        got = jax.jit(jax.vmap(gradient, axes))(*args)
        rows = [gradient(*(x if a is None else x[i] for a, x in zip(axes, args, strict=True))) for i in range(2)]
        assert_close(got, jax.tree.map(lambda *x: jnp.stack(x), *rows), factor=2)


def test_a_batch_is_one_launch():
    query, key, value, ct = (jnp.stack([x, x]) for x in inputs())
    mask = normal(1, 1, 21, 37)
    text = str(
        jax.make_jaxpr(jax.vmap(lambda q, k, v, ct: jax.vjp(lambda m: attention(q, k, v, mask=m), mask)[1](ct)))(
            query, key, value, ct
        )
    )
    assert "scan" not in text


def test_derivatives_of_higher_order():
    query, key, value, _ = inputs(1, 2, 1, 3, 4, 2)

    def loss(f):
        return lambda args: (f(*args)[0] ** 3).sum() + (f(*args)[1] ** 2).sum()

    ours = loss(functools.partial(attention, return_logsumexp=True))
    args = (query, key, value)
    along = tuple(normal(*x.shape, seed=6 + i) for i, x in enumerate(args))

    def second(f, over):
        return jax.jit(over(jax.grad(f)))(args)

    def forward_over(gradient):
        return lambda args: jax.jvp(gradient, (args,), (along,))[1]

    def reverse_over(gradient):
        return lambda args: jax.vjp(gradient, args)[1](along)[0]

    # Each order of derivatives sums products of the previous order.
    assert_close(jax.jvp(ours, (args,), (along,)), jax.jvp(loss(plain), (args,), (along,)), factor=4)
    want = second(loss(plain), forward_over)
    assert_close(second(ours, forward_over), want, factor=8)
    assert_close(second(ours, reverse_over), want, factor=8)


def test_unsupported_arguments_use_jnp():
    x = jnp.zeros((1, 2, 3, 4))
    assert unsupported_reason(x, x, x) is None
    assert unsupported_reason(x, x[:, :, :0], x[:, :, :0]) == "`key` has no elements"
    assert unsupported_reason(x, x.astype(jnp.float16), x) == "`key` is float16, `query` is float32"
    wide = jnp.zeros((1, 2, 3, 300))
    assert unsupported_reason(wide, wide, wide) == "`query` has heads of 300, the kernels take up to 256"
    assert unsupported_reason(x, x, wide) == "`value` has shape (1, 2, 3, 300), `key` has (1, 2, 3, 4)"
    ones = jnp.ones((1, 2, 3, 300))
    assert_close(attention(x, x, ones), ones)
    assert not attention(x, x[:, :, :0], x[:, :, :0]).any()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"query": jnp.zeros((3, 4))}, r"`query` has shape \(3, 4\), expected \[batch, heads, length, head size\]"),
        (
            {"key": jnp.zeros((2, 2, 3, 4))},
            r"`key` has shape \(2, 2, 3, 4\), expected \(1, heads, length, 4\) for `query`",
        ),
        (
            {"value": jnp.zeros((1, 2, 5, 4))},
            r"`value` has shape \(1, 2, 5, 4\), expected that of `key`, \(1, 2, 3, 4\), but",
        ),
        ({"query": jnp.zeros((1, 3, 3, 4))}, "`query` has 3 heads, expected a multiple of the 2 heads of `key`"),
        ({"mask": jnp.zeros((2, 3))}, r"`mask` has shape \(2, 3\), expected one that broadcasts to \(1, 2, 3, 3\)"),
        ({"mask": jnp.zeros(3, int)}, "`mask` is int32, expected bool"),
        ({"window": (1, -1)}, r"`window` is \(1, -1\), expected two counts"),
        ({"window": (1.5, 1)}, r"`window` is \(1.5, 1\), expected two counts"),
        ({"window": 3}, "`window` is 3, expected two counts"),
        (
            {"key": jnp.zeros((1, 0, 3, 4)), "value": jnp.zeros((1, 0, 3, 4))},
            "`query` has 2 heads, expected a multiple of the 0 heads of `key`",
        ),
        ({"dropout_rate": 2.0}, "`dropout_rate` is 2.0, expected a probability"),
        ({"dropout_rate": 0.5}, "`dropout_key` must be given"),
    ],
)
def test_invalid_arguments_are_refused(keywords, message):
    x = jnp.zeros((1, 2, 3, 4))
    with pytest.raises(ValueError, match=message):
        attention(**({"query": x, "key": x, "value": x} | keywords))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"key": jnp.zeros((1, 2, 3, 4), jnp.bfloat16)}, "`key` is bfloat16, expected the dtype of `query`, float32"),
        ({"scale": math.nan}, "`scale` is nan, expected a number"),
        ({"scale": "1"}, "`scale` is '1', expected a number that is known when JAX traces"),
        ({"is_causal": "no"}, "`is_causal` is 'no', expected True or False"),
    ],
)
def test_arguments_of_other_types_are_refused(keywords, message):
    x = jnp.zeros((1, 2, 3, 4))
    with pytest.raises(TypeError, match=message):
        attention(**({"query": x, "key": x, "value": x} | keywords))


def test_a_scale_may_be_an_array_with_a_value():
    x = jnp.arange(24.0).reshape(1, 2, 3, 4) / 24
    np.testing.assert_array_equal(attention(x, x, x, scale=1 / jnp.sqrt(4)), attention(x, x, x))
    with pytest.raises(TypeError, match=r"`scale` is .*, expected a number that is known when JAX traces"):
        jax.jit(lambda scale: attention(x, x, x, scale=scale))(0.5)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_non_float_dtypes_are_refused(dtype):
    x = jnp.ones((1, 2, 3, 4))
    with pytest.raises(TypeError, match=f"^`key` is {dtype}, not of a real floating-point dtype$"):
        attention(x, x.astype(dtype), x)


def test_empty_input():
    some = jnp.ones((1, 2, 3, 4))
    out, logsumexp = attention(some[:, :, :0], some, some, return_logsumexp=True)
    assert (out.shape, logsumexp.shape) == ((1, 2, 0, 4), (1, 2, 0))
    assert attention(*[some[:0]] * 3).shape == (0, 2, 3, 4)
    assert attention(*[some[:, :0]] * 3).shape == (1, 0, 3, 4)


@pytest.mark.parametrize("masked", ["none", "boolean", "additive"])
def test_nan_and_infinity_propagate(masked):
    """A NaN or infinity appears in the logarithm, and in every gradient of its row."""
    query, key, value, ct = inputs(1, 2, 1, 5, 7, 8)
    query = query.at[0, 1, 2, 3].set(jnp.nan)
    mask = {"none": None, "boolean": jnp.ones((5, 7), bool), "additive": jnp.zeros((5, 7))}[masked]
    (out, logsumexp), pull = jax.vjp(lambda *x: attention(*x, mask=mask, return_logsumexp=True), query, key, value)
    for found in (out[..., 0], logsumexp):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(query).any(-1))
    by_query, by_key, by_value = pull((ct, 0 * logsumexp))
    np.testing.assert_array_equal(np.isnan(by_query).any(-1), np.isnan(query).any(-1))
    assert jnp.isnan(by_key).all()
    assert jnp.isnan(by_value).all()


def test_nan_in_an_additive_mask_propagates():
    query, key, value, _ = inputs(1, 2, 1, 5, 7, 8)
    mask = jnp.zeros((5, 7)).at[2, 3].set(jnp.nan)
    out, logsumexp = attention(query, key, value, mask=mask, return_logsumexp=True)
    assert jnp.isnan(out[:, :, 2]).all()
    assert jnp.isnan(logsumexp[:, :, 2]).all()
    assert jnp.isfinite(out[:, :, :2]).all()


@needs_triton
@needs_interpreter
@pytest.mark.parametrize("entry", [(64, 2), (128, 2), (256, 2), (64, 4)])
def test_every_configuration_gives_the_same_result(entry, monkeypatch):
    d, itemsize = entry
    query, key, value, ct = inputs(1, 2, 1, 150, 170, d, {2: "bfloat16", 4: "float32"}[itemsize])
    given = reference.AttentionSettings(1 / math.sqrt(d), None, 0, "none", 0.0)
    out, logsumexp = reference.forward(query, key, value, settings=given)
    arrays = query, key, value, out, logsumexp, ct, jnp.zeros_like(logsumexp)
    want = [out, logsumexp, *reference.backward(*arrays, settings=given)]
    tables = [candidates[entry] for candidates in CANDIDATES]
    for i in range(max(map(len, tables))):
        for table, each in zip(TABLES, tables, strict=True):
            monkeypatch.setitem(table, entry, (each[min(i, len(each) - 1)],))
        got = differentiable._forward(query, key, value, settings=given)
        got += differentiable._backward(*arrays, settings=given)
        assert_close(got, want, BETWEEN)
