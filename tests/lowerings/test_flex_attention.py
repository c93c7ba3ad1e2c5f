"""`flex_attention`: functions of the scores, masks, block masks, and torch's own afterwards."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.nn.attention.flex_attention import (
    AuxRequest,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
)

import jtbridge

from .harness import check

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def same_document(b: Any, h: Any, q: Any, k: Any) -> Any:
    return DOCUMENTS[q] == DOCUMENTS[k]


def after_the_first(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q > 0) & (k > 0)


def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + SLOPES[h] * (k - q)


def soft_cap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 2.0 * torch.tanh(score / 2.0)


def blocks_of(mask: Callable, batch: int | None = None) -> Any:
    return create_block_mask(mask, batch, None, 8, 8, device="cpu", BLOCK_SIZE=4)


CAUSAL, DOCUMENT_BLOCKS = blocks_of(causal), blocks_of(and_masks(causal, same_document))

# Calls, each with its score function, mask function and scale.
CASES: dict[str, tuple[Any, Any, Any, float]] = {
    "plain": (flex_attention, None, None, 0.25),
    "scale": (lambda q, k, v: flex_attention(q, k, v, scale=0.3), None, None, 0.3),
    "alibi": (lambda q, k, v: flex_attention(q, k, v, score_mod=alibi), alibi, None, 0.25),
    "soft cap": (lambda q, k, v: flex_attention(q, k, v, score_mod=soft_cap), soft_cap, None, 0.25),
    "causal": (lambda q, k, v: flex_attention(q, k, v, block_mask=blocks_of(causal)), None, causal, 0.25),
    "causal, mask made outside": (lambda q, k, v: flex_attention(q, k, v, block_mask=CAUSAL), None, causal, 0.25),
    "documents": (
        lambda q, k, v: flex_attention(q, k, v, alibi, DOCUMENT_BLOCKS),
        alibi,
        and_masks(causal, same_document),
        0.25,
    ),
    "a row that is masked": (
        lambda q, k, v: flex_attention(q, k, v, block_mask=blocks_of(after_the_first)),
        None,
        after_the_first,
        0.25,
    ),
}


def reference(score_mod: Callable | None, mask: Callable | None, scale: float) -> Callable:
    """Return the same attention on the whole matrix of scores. On a CPU, torch's `flex_attention` has no gradient."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        shape = [q.shape[0], q.shape[1], q.shape[2], k.shape[2]]
        places = [torch.arange(n).reshape([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(shape)]
        scores = q.float() @ k.float().mT * scale
        scores = scores if score_mod is None else score_mod(scores, *places)
        allowed = torch.ones(shape, dtype=torch.bool) if mask is None else mask(*places).expand(shape)
        weights = scores.masked_fill(~allowed, -1e30).softmax(-1) * allowed
        return weights.to(q.dtype) @ v

    return attention


def tensors(heads: int = 4, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, h, 8, 16).to(dtype) for h in (4, heads, heads))


def gradients(function: Callable, args: Any) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in args]
    function(*leaves).float().square().sum().backward()
    return [x.grad for x in leaves]  # type: ignore[misc]


def check_gradients(
    function: Callable, args: Any, expected: list[torch.Tensor], rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    translated = jtbridge.wrap(function, backend="xla")
    loss = lambda *args: (translated(*args).astype(jnp.float32) ** 2).sum()  # noqa: E731
    found = jax.jit(jax.grad(loss, tuple(range(len(args)))))(*jtbridge.to_jax(args))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(jtbridge.to_torch(ours), theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_values_match_torch_and_gradients_match_dense_attention(name):
    function, score_mod, mask, scale = CASES[name]
    args = tensors()
    check(function, *args)
    check_gradients(function, args, gradients(reference(score_mod, mask, scale), args))


@pytest.mark.parametrize("mode", ["jit", "eager"])
def test_grouped_queries_and_the_log_sum_of_each_row(mode):
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        request = AuxRequest(lse=True)
        blocks = blocks_of(after_the_first)
        out, more = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True, return_aux=request)
        return out, more.lse

    args = tensors(heads=2)
    function = jtbridge.wrap(attention)
    got = (jax.jit(function) if mode == "jit" else function)(*jtbridge.to_jax(args))
    for ours, theirs in zip(got, attention(*args), strict=True):
        torch.testing.assert_close(jtbridge.to_torch(ours), theirs)


def test_a_gradient_through_the_log_sum_and_a_masked_row():
    def log_sums(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        _, more = flex_attention(q, k, v, block_mask=blocks_of(after_the_first), return_aux=AuxRequest(lse=True))
        assert more.lse is not None
        return more.lse[:, :, 1:] * v.sum()

    def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q[:, :, 1:] @ k[:, :, 1:].mT / 4).logsumexp(-1) * v.sum()

    args = tensors()
    check(log_sums, *args)
    check_gradients(log_sums, args, gradients(expected, args), atol=1e-3)  # they are up to 1e3


def test_bfloat16():
    function, score_mod, mask, scale = CASES["alibi"]
    args = tensors(dtype=torch.bfloat16)
    check(function, *args, rtol=2e-2, atol=1e-2)
    check_gradients(function, args, gradients(reference(score_mod, mask, scale), args), rtol=3e-2, atol=5e-2)


def test_a_learned_bias_has_a_gradient():
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + bias[h, i - j + 7])

    def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(8)
        return (q @ k.mT / 4 + bias[:, rows[:, None] - rows + 7]).softmax(-1) @ v

    args = (*tensors(), torch.randn(4, 15))
    check(attention, *args)
    check_gradients(attention, args, gradients(expected, args))


def test_documents_are_an_argument():
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        blocks = blocks_of(lambda b, h, i, j: documents[b, i] == documents[b, j], batch=2)
        return flex_attention(q, k, v, block_mask=blocks)

    documents = torch.stack([DOCUMENTS, DOCUMENTS.flip(0)])
    mask = create_mask(lambda b, h, i, j: documents[b, i] == documents[b, j], 2, None, 8, 8, device="cpu")
    q, k, v = tensors()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    function = jtbridge.wrap(attention, backend="xla")
    for run in (function, jax.jit(function)):
        got = run(*jtbridge.to_jax((q, k, v, documents)))
        torch.testing.assert_close(jtbridge.to_torch(got), expected, rtol=1e-5, atol=1e-5)


def test_batches_and_forward_mode():
    args = jtbridge.to_jax(tensors())
    function = jtbridge.wrap(CASES["causal, mask made outside"][0], backend="xla")

    def in_jax(q: Any, k: Any, v: Any) -> Any:
        mask = jnp.tri(8, dtype=bool)
        return jax.nn.softmax(jnp.where(mask, q @ k.mT / 4, -jnp.inf)) @ v

    tangents = jax.tree.map(jnp.cos, args)
    for ours, theirs in zip(jax.jvp(function, args, tangents), jax.jvp(in_jax, args, tangents), strict=True):
        torch.testing.assert_close(jtbridge.to_torch(ours), jtbridge.to_torch(theirs), rtol=1e-4, atol=1e-5)
    stacked = jax.tree.map(lambda x: jnp.stack([x, -x, 2 * x]), args)
    ours, theirs = jax.jit(jax.vmap(function))(*stacked), jax.vmap(in_jax)(*stacked)
    torch.testing.assert_close(jtbridge.to_torch(ours), jtbridge.to_torch(theirs), rtol=1e-4, atol=1e-5)


def test_torch_flex_attention_works_before_and_after_a_trace():
    function = CASES["alibi"][0]
    args = tensors()
    torch.compiler.reset()
    before = function(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("error", jtbridge.errors.CalledWarning)
        ours = jax.jit(jtbridge.wrap(function))(*jtbridge.to_jax(args))
    torch.testing.assert_close(jtbridge.to_torch(ours), before)
    torch.testing.assert_close(function(*args), before)
    torch.compiler.reset()
    torch.testing.assert_close(function(*args), before)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        function(*[x.clone().requires_grad_() for x in args])
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, backend="eager")
    torch.testing.assert_close(compiled(*args, score_mod=alibi), before)
