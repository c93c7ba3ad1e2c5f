"""Default models of transformers: outputs, and caches that are passed from one call to the next."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
modes = pytest.mark.parametrize("mode", ["eager", "jit"])

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
PROMPT = np.array([[5, 9, 2, 7, 11, 3]])
NEXT = np.array([[4]])


def llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS))


def mistral() -> torch.nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, **HEADS, sliding_window=4))


def gpt2() -> torch.nn.Module:
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def mamba() -> torch.nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))


def t5() -> torch.nn.Module:
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


CAUSAL: dict[str, tuple[Callable[[], Any], str]] = {
    "llama": (llama, "past_key_values"),
    "mistral": (mistral, "past_key_values"),
    "gpt2": (gpt2, "past_key_values"),
    "mamba": (mamba, "cache_params"),
}


def net_of(make: Callable[[], Any]) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    model = make().eval()
    net = jtbridge.module(model)
    return model, net, *net.init()


def caller(net: Any, mode: str) -> Callable[..., Any]:
    call = lambda params, state, inputs: net(params, state, use_cache=True, **inputs)[0]  # noqa: E731
    return jax.jit(call) if mode == "jit" else call


def close(actual: Any, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(actual, expected.detach().numpy(), rtol=1e-4, atol=1e-5)


@modes
@pytest.mark.parametrize("name", CAUSAL)
def test_a_returned_cache_is_passed_to_the_next_call(name: str, mode: str):
    make, key = CAUSAL[name]
    model, net, params, state = net_of(make)
    call = caller(net, mode)
    with torch.no_grad():
        expected = model(torch.from_numpy(PROMPT), use_cache=True)
        out = call(params, state, {"input_ids": PROMPT})
        assert type(out) is type(expected)
        close(out.logits, expected.logits)
        for _ in range(2):
            expected = model(torch.from_numpy(NEXT), use_cache=True, **{key: expected[key]})
            out = call(params, state, {"input_ids": NEXT, key: out[key]})
            assert type(out[key]) is type(expected[key])
            close(out.logits, expected.logits)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(out))


@modes
def test_encoder_decoder_cache(mode: str):
    model, net, params, state = net_of(t5)
    call = caller(net, mode)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(PROMPT), decoder_input_ids=torch.zeros(1, 1, dtype=torch.long))
        out = call(params, state, {"input_ids": PROMPT, "decoder_input_ids": NEXT * 0})
        close(out.logits, expected.logits)
        for _ in range(2):
            expected = model(
                encoder_outputs=(expected.encoder_last_hidden_state,),
                decoder_input_ids=torch.from_numpy(NEXT),
                past_key_values=expected.past_key_values,
            )
            cache, encoded = out.past_key_values, (out.encoder_last_hidden_state,)
            assert type(cache) is transformers.EncoderDecoderCache
            inputs = {"encoder_outputs": encoded, "decoder_input_ids": NEXT, "past_key_values": cache}
            out = call(params, state, inputs)
            close(out.logits, expected.logits)


def static_cache(model: Any, length: int = 16) -> Any:
    config = model.config
    cache = transformers.StaticCache(config=config, max_cache_len=length)
    cache.early_initialization(
        batch_size=1,
        num_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return cache


@modes
def test_a_static_cache(mode: str):
    model, net, params, state = net_of(llama)
    call = caller(net, mode)
    theirs = static_cache(model)
    ours = jtbridge.to_jax(static_cache(model))
    kept = ours
    with torch.no_grad():
        for ids in (PROMPT, NEXT, NEXT):
            expected = model(torch.from_numpy(ids), past_key_values=theirs)
            out = call(params, state, {"input_ids": ids, "past_key_values": ours})
            ours = out.past_key_values
            close(out.logits, expected.logits)
    assert int(ours.layers[0].cumulative_length) == 8
    assert int(kept.layers[0].cumulative_length) == 0  # arguments are not written to


def test_a_static_cache_is_the_carry_of_a_scan():
    model, net, params, state = net_of(llama)
    cache = jtbridge.to_jax(static_cache(model))

    @jax.jit
    def decode(params: Any, state: Any, cache: Any, ids: Any) -> Any:
        out, _ = net(params, state, ids, past_key_values=cache)

        def body(carry: Any, _: Any) -> Any:
            cache, token = carry
            out, _ = net(params, state, token, past_key_values=cache)
            token = out.logits[:, -1:].argmax(-1).astype(token.dtype)
            return (out.past_key_values, token), token[:, 0]

        first = out.logits[:, -1:].argmax(-1).astype(ids.dtype)
        _, tokens = jax.lax.scan(body, (out.past_key_values, first), length=5)
        return jnp.concatenate([first, tokens.T], axis=1)

    expected = model.generate(torch.from_numpy(PROMPT), max_new_tokens=6, do_sample=False, eos_token_id=None)
    np.testing.assert_array_equal(decode(params, state, cache, PROMPT), expected[:, PROMPT.shape[1] :])


def test_an_empty_cache_is_an_argument_of_jit():
    model, net, params, state = net_of(llama)
    inputs = {"input_ids": PROMPT, "past_key_values": transformers.DynamicCache(config=model.config)}
    out = caller(net, "jit")(params, state, inputs)
    close(out.logits, model(torch.from_numpy(PROMPT)).logits)


@modes
def test_a_training_step(mode: str):
    model, net, params, state = net_of(gpt2)

    def loss(params: Any) -> Any:
        return net(params, state, PROMPT, labels=PROMPT, train=True, rng=jax.random.key(0))[0].loss

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.attn_pdrop = 0.0
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.0
    step = jax.value_and_grad(loss)
    value, gradients = (jax.jit(step) if mode == "jit" else step)(params)
    expected = model.train()(torch.from_numpy(PROMPT), labels=torch.from_numpy(PROMPT)).loss
    expected.backward()
    np.testing.assert_allclose(value, expected.detach(), rtol=1e-5)
    close(gradients["transformer.wte.weight"], model.transformer.wte.weight.grad)
    assert "lm_head.weight" not in gradients


def test_a_state_dict_has_the_tied_weight_under_both_names():
    model, net, params, state = net_of(gpt2)
    ours = net.state_dict(params, state)
    assert list(ours) == list(model.state_dict())
    loaded, _ = net.from_state_dict(ours)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_hidden_states_are_captured_by_hooks_of_the_copy():
    model, net, params, state = net_of(llama)
    attributes = {name: set(vars(part)) for name, part in model.named_modules()}
    hooks = {name: len(part._forward_hooks) for name, part in model.named_modules()}
    for call in (net, jax.jit(net, static_argnames="output_hidden_states")):
        out, _ = call(params, state, PROMPT, output_hidden_states=True)
        assert len(out.hidden_states) == 3
    assert hooks == {name: len(part._forward_hooks) for name, part in model.named_modules()}
    assert attributes == {name: set(vars(part)) for name, part in model.named_modules()}
    with torch.no_grad():
        expected = model(torch.from_numpy(PROMPT), output_hidden_states=True)
    for a, b in zip(out.hidden_states, expected.hidden_states, strict=True):
        close(a, b)


def test_a_torch_model_does_not_import_transformers():
    code = (
        "import sys, torch, jtbridge; net = jtbridge.module(torch.nn.Linear(1, 1)); p, s = net.init();"
        "net(p, s, torch.ones(1, 1)); print([n for n in ('transformers', 'safetensors', 'optax') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=os.getcwd())
    assert done.stdout.strip() == "[]"
