"""Hugging Face models as they are: their default cache, mixtures of experts, masks by the values of tokens."""

from __future__ import annotations

import io
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import jtbridge
from jtbridge.capture import _branches_on_fake
from jtbridge.errors import TranslationError

transformers = pytest.importorskip("transformers")
import_utils = pytest.importorskip("transformers.utils.import_utils")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # transformers' own, and CalledWarning
]
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
TOKENS = np.arange(1, 13).reshape(2, 6)


def made(name, config):
    torch.manual_seed(0)
    return getattr(transformers, name)(config).eval()


def mixture(name):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    options = sizes if name == "Qwen3Moe" else {"num_local_experts": 4}
    model = made(f"{name}ForCausalLM", getattr(transformers, f"{name}Config")(**TEXT, **options))
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_a_model_with_its_default_cache(backend):
    model = made("LlamaForCausalLM", transformers.LlamaConfig(**TEXT))
    f = jax.jit(jtbridge.wrap(lambda tokens: model(input_ids=tokens), backend=backend))
    with torch.no_grad():
        wanted = model(input_ids=torch.from_numpy(TOKENS))
    for _ in range(2):
        got = f(jnp.asarray(TOKENS))
    np.testing.assert_allclose(got.logits, wanted.logits, atol=1e-5)
    assert type(got.past_key_values) is type(wanted.past_key_values)
    for ours, theirs in zip(got.past_key_values.layers, wanted.past_key_values.layers, strict=True):
        np.testing.assert_allclose(ours.keys, theirs.keys, atol=1e-5)
        np.testing.assert_allclose(ours.values, theirs.values, atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_returned_cache_is_an_argument(backend):
    model = made("LlamaForCausalLM", transformers.LlamaConfig(**TEXT))
    f = jtbridge.wrap(lambda tokens, cache=None: model(input_ids=tokens, past_key_values=cache), backend=backend)
    first = jax.jit(f)(jnp.asarray(TOKENS[:, :4]))
    cache = jax.tree.map(lambda x: x, first.past_key_values)
    second = jax.jit(f)(jnp.asarray(TOKENS[:, 4:]), cache)
    with torch.no_grad():
        wanted = model(input_ids=torch.from_numpy(TOKENS)).logits[:, 4:]
    np.testing.assert_allclose(second.logits, wanted, atol=1e-5)
    assert cache.layers[0].keys.shape[2] == 4
    assert second.past_key_values.layers[0].keys.shape[2] == 6


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_eager_routing_to_experts(name):
    model = mixture(name)

    def fn(embedded):
        return model(inputs_embeds=embedded, use_cache=False).logits

    embedded = model.get_input_embeddings()(torch.from_numpy(TOKENS)).detach()
    f = jtbridge.wrap(fn)
    x = jnp.asarray(embedded.numpy())
    np.testing.assert_allclose(jax.jit(f)(x), fn(embedded).detach(), atol=1e-5)
    moved = embedded.clone().requires_grad_()
    (wanted,) = torch.autograd.grad((fn(moved) ** 2).sum(), moved)
    got = jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))(x)
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)


def test_images_replace_tokens():
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=5,
        vision_feature_layer=-1,
    )
    model = made("LlavaForConditionalGeneration", config)
    tokens = np.array([[1, 5, 5, 5, 5, 7], [5, 5, 5, 5, 2, 3]])
    pixels = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)

    def fn(tokens, pixels):
        return model(input_ids=tokens, pixel_values=pixels, use_cache=False).logits

    f = jtbridge.wrap(fn)
    wanted = fn(torch.from_numpy(tokens), torch.from_numpy(pixels)).detach()
    np.testing.assert_allclose(jax.jit(f)(jnp.asarray(tokens), jnp.asarray(pixels)), wanted, atol=1e-5)


def masked_encoder():
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.BertModel(config, add_pooling_layer=False).eval()


@pytest.mark.parametrize("mask", [np.ones((2, 6), np.int32), np.array([[1] * 6, [1, 1, 1, 0, 0, 0]], np.int32)])
def test_skippable_mask_is_compared_without_running_the_model(mask, monkeypatch):
    def run(*_):
        raise AssertionError("the model ran on values")

    monkeypatch.setattr(_branches_on_fake, "run_on_values", run)
    model = masked_encoder()
    f = jax.jit(jtbridge.wrap(lambda tokens, mask: model(tokens, mask).last_hidden_state, backend="xla"))
    with torch.no_grad():
        wanted = model(torch.from_numpy(TOKENS), torch.from_numpy(mask)).last_hidden_state
    np.testing.assert_allclose(f(jnp.asarray(TOKENS), jnp.asarray(mask)), wanted, atol=1e-5)


def attends_to_more_if_fake(x, mask):
    """A model that omits a full mask and is then causal: with a fake mask it computes something else."""
    ours = mask[:, None, None, :].bool()
    if not import_utils.is_tracing(mask) and bool(mask.all()):
        return F.scaled_dot_product_attention(x, x, x, attn_mask=None, is_causal=True)
    return F.scaled_dot_product_attention(x, x, x, attn_mask=ours)


def scaled_if_fake(x, mask):
    """A model whose test of the mask changes a number."""
    return x * (2 if import_utils.is_tracing(mask) else 3) + mask[..., None, None]


@pytest.mark.parametrize("model", [attends_to_more_if_fake, scaled_if_fake])
def test_model_that_depends_on_fake_masks_is_called(model):
    x = np.random.default_rng(0).normal(size=(2, 2, 6, 4) if model is attends_to_more_if_fake else (2, 6, 1, 1))
    x, mask = x.astype(np.float32), np.ones((2, 6), np.int32)
    wanted = model(torch.from_numpy(x), torch.from_numpy(mask))
    f = jtbridge.wrap(model)
    np.testing.assert_allclose(jax.jit(f)(jnp.asarray(x), jnp.asarray(mask)), wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(TranslationError, match="computes something else when it is traced"):
        jax.jit(jtbridge.wrap(model, backend="xla"))(jnp.asarray(x), jnp.asarray(mask))


def test_a_model_that_warns_about_padding_is_traced_without_further_runs(monkeypatch):
    """It runs for the types of its results, where torch may raise inside an exception handler, and for its graph."""
    ended = io.StringIO()  # whose contents are not state of the function
    forward = transformers.GPT2Model.forward

    def counted(self, *args, **kwargs):
        result = forward(self, *args, **kwargs)
        ended.write(".")
        return result

    monkeypatch.setattr(transformers.GPT2Model, "forward", counted)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, pad_token_id=0)
    model = transformers.GPT2Model(config).eval()
    f = jtbridge.wrap(lambda tokens: model(tokens).last_hidden_state, backend="xla")
    jax.jit(f).trace(jnp.asarray(TOKENS))
    assert len(ended.getvalue()) <= 3
