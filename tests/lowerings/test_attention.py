"""Attention: masks, blocks and groups of queries, and rows in which all keys are masked."""

from typing import Any

import jax
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

import jtbridge

from .harness import check

TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def _heads(length: int, count: int = 4, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, count, length, 8)


@pytest.mark.parametrize(("queries", "keys"), [(5, 7), (260, 520)])  # 260 queries: several blocks, the last partial
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_values_and_gradients(queries, keys, options):
    q, k, v = _heads(queries), _heads(keys), _heads(keys)
    check(lambda q, k, v: attention(q, k, v, **options), q, k, v, grad=True, **TOLERANCE)


@pytest.mark.parametrize("shape", [(1, 520), (2, 1, 260, 520), (1, 4, 260, 520)])
def test_masks_broadcast(shape):
    q, k, v = _heads(260), _heads(520), _heads(520)
    check(lambda q, k, v, m: attention(q, k, v, attn_mask=m), q, k, v, torch.rand(shape) > 0.3, grad=True, **TOLERANCE)


@pytest.mark.parametrize("queries", [6, 260])
def test_several_query_heads_share_a_head_of_the_keys(queries):
    q, k, v, mask = _heads(queries, 8), _heads(520, 2), _heads(520, 2), torch.randn(queries, 520)
    check(lambda q, k, v, m: attention(q, k, v, attn_mask=m, enable_gqa=True), q, k, v, mask, grad=True, **TOLERANCE)


def test_fully_masked_query_gets_zero_and_no_gradient():
    def both(q, mask):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, attn_mask=mask)

    mask = torch.zeros(5, 5)
    mask[1] = -torch.inf
    check(both, _heads(5), mask)
    check(lambda q: attention(q, q, q, attn_mask=mask), _heads(5), grad=True, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    q, k, v = _heads(6).to(dtype), _heads(7).to(dtype), _heads(7).to(dtype)
    check(attention, q, k, v, grad=True, **({"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}))


def test_scores_are_computed_in_blocks_of_queries():
    length = 2048
    q = jtbridge.to_jax(_heads(length, 1, 1))
    compiled = jax.jit(jtbridge.wrap(lambda q: attention(q, q, q), backend="xla")).lower(q).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < length * length * 4 / 4
