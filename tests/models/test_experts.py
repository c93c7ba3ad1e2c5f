"""Mixtures of experts of transformers: grouped products, and the routing that loops over experts."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::DeprecationWarning")

IDS = np.array([[5, 9, 2, 7, 11, 3], [1, 4, 4, 8, 30, 31]])


def mixtral(implementation: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        initializer_range=0.2,
        router_aux_loss_coef=0.02,
        output_router_logits=True,
        experts_implementation=implementation,
    )
    return transformers.MixtralForCausalLM(config).to(dtype).eval()


def gradients(model: torch.nn.Module, mode: str) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """Return both losses, jtbridge's gradients, and torch's."""
    net = jtbridge.module(model)
    params, state = net.init()
    step = jax.value_and_grad(lambda params: net(params, state, IDS, labels=IDS, use_cache=False)[0].loss)
    value, found = (jax.jit(step) if mode == "jit" else step)(params)
    loss = model(torch.from_numpy(IDS), labels=torch.from_numpy(IDS), use_cache=False).loss
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    return (value, loss.detach()), found, expected  # type: ignore[return-value]


def check_gradients(found: dict[str, Any], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, theirs in expected.items():
        a, b = np.asarray(found[name].astype(jnp.float32)), theirs.float().numpy()
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), name


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_grouped_products_are_translated(mode: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error", jtbridge.errors.CalledWarning)
        (value, loss), found, expected = gradients(mixtral("grouped_mm"), mode)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    check_gradients(found, expected, 1e-4)


def test_grouped_products_in_bfloat16():
    with warnings.catch_warnings():
        warnings.simplefilter("error", jtbridge.errors.CalledWarning)
        (value, loss), found, expected = gradients(mixtral("grouped_mm", torch.bfloat16), "jit")
    np.testing.assert_allclose(float(value), float(loss), rtol=2e-2)
    check_gradients(found, expected, 6e-2)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_loop_over_experts_with_tokens(mode: str):
    (value, loss), found, expected = gradients(mixtral("eager"), mode)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    check_gradients(found, expected, 1e-4)
