"""Models of transformers over eight devices: values, bytes on each device, and collectives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

from .test_sharding import largest_share, mesh_of

optax = pytest.importorskip("optax")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 16}
SAME = {"num_attention_heads": 8, "max_position_embeddings": 16}
IDS = np.random.default_rng(0).integers(3, 256, (8, 8))
PIXELS = np.random.default_rng(0).normal(size=(8, 3, 16, 16)).astype(np.float32)


def t5() -> torch.nn.Module:
    sizes = {"vocab_size": 256, "d_model": 64, "d_kv": 8, "d_ff": 128, "num_layers": 1, "num_heads": 8}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def bart() -> torch.nn.Module:
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in BART.items()}
    config = transformers.BartConfig(vocab_size=256, d_model=64, max_position_embeddings=16, **sizes)
    return transformers.BartForConditionalGeneration(config)


BART = {"layers": 1, "attention_heads": 8, "ffn_dim": 128}


def vit() -> torch.nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 8}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=4))


def gpt2() -> torch.nn.Module:
    sizes = {"vocab_size": 256, "n_positions": 16, "n_embd": 64, "n_layer": 1, "n_head": 8}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def opt() -> torch.nn.Module:
    sizes = {"vocab_size": 256, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 1, "word_embed_proj_dim": 64}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, **SAME))


def causal(name: str, config: str | None = None, **sizes: Any) -> Callable[[], torch.nn.Module]:
    make = getattr(transformers, config or f"{name}Config")
    return lambda: getattr(transformers, f"{name}ForCausalLM")(make(**SIZES, **sizes))


FAMILIES: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": causal("Llama", **HEADS),
    "mistral": causal("Mistral", **HEADS),
    "qwen3": causal("Qwen3", **HEADS, head_dim=8),
    "gemma3": causal("Gemma3", "Gemma3TextConfig", **HEADS, head_dim=8),
    "phi": causal("Phi", **SAME),
    "phi3": causal("Phi3", **HEADS, pad_token_id=0),
    "gpt2": gpt2,
    "opt": opt,
    "t5": t5,
    "bart": bart,
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **SAME)),
    "vit": vit,
}


def inputs_of(name: str) -> dict[str, np.ndarray]:
    if name == "vit":
        return {"pixel_values": PIXELS}
    return {"input_ids": IDS} | ({"decoder_input_ids": IDS} if name in ("t5", "bart") else {})


def made(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return FAMILIES[name]().eval()


def collectives(text: str) -> dict[str, int]:
    """Count the collective operations of a compiled program."""
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return dict(Counter(re.findall(rf" ({names})(?:-start)?\(", text)))


@pytest.mark.parametrize("name", FAMILIES)
def test_tensor_parallel_values_and_gradients_match_torch(name):
    model = made(name)
    inputs = inputs_of(name)
    logits = model(**{key: torch.tensor(x) for key, x in inputs.items()}).logits
    (logits**2).mean().backward()
    expected = {key: x.grad.numpy() for key, x in model.named_parameters()}

    net = jtbridge.module(model)
    mesh = mesh_of(8)
    params, state = net.init(mesh=mesh, rules="tensor")

    @jax.jit
    def run(params, state, inputs):
        def loss(params):
            out = net(params, state, **inputs)[0].logits
            return jnp.mean(out**2), out

        gradients, out = jax.grad(loss, has_aux=True)(params)
        return out, jtbridge.shard(gradients, mesh, "tensor")

    out, gradients = run(params, state, jtbridge.shard_batch(inputs, mesh))
    np.testing.assert_allclose(out, logits.detach().numpy(), rtol=1e-4, atol=1e-5)
    for key, gradient in gradients.items():
        assert gradient.sharding.is_equivalent_to(params[key].sharding, gradient.ndim), key
        np.testing.assert_allclose(gradient, expected[key], rtol=1e-3, atol=2e-6, err_msg=key)
    matrices = {key: x for key, x in params.items() if x.ndim > 1 and "position" not in key and "bias" not in key}
    small = ("wpe", "token_type", "cls_token", "classifier")
    for key, x in matrices.items():
        assert x.sharding.is_fully_replicated == any(part in key for part in small), key


@pytest.mark.parametrize("name", FAMILIES)
def test_fully_sharded_each_device_holds_an_eighth(name):
    params, _ = jtbridge.module(made(name)).init(mesh=mesh_of(8, names=("data",)), rules="fsdp")
    assert largest_share(params) <= 1.05 / 8


@pytest.mark.parametrize(
    ("sizes", "names", "rules", "share", "expected"),
    [
        ((8,), ("data",), "replicated", 1, {"all-reduce"}),
        ((8,), ("data",), "fsdp", 1 / 8, {"all-gather", "all-reduce"}),
        ((8,), ("model",), "tensor", 1 / 8, {"all-reduce"}),
        ((2, 4), ("data", "model"), "tensor", 1 / 4, {"all-reduce"}),
        ((2, 4), ("data", "model"), "tensor+fsdp", 1 / 8, {"all-gather", "all-reduce"}),
    ],
)
def test_training_losses_match_one_device(sizes, names, rules, share, expected, losses_on_one_device):
    net = jtbridge.module(made_llama())
    mesh = mesh_of(*sizes, names=names)
    params, state = net.init(release=True, mesh=mesh, rules=rules)
    opt_state = jtbridge.shard(optax.adamw(1e-2).init(params), mesh, rules)
    assert share <= largest_share(params) <= 1.05 * share
    assert share <= largest_share(opt_state[0].mu) <= 1.05 * share
    step = step_of(net)
    batch = jtbridge.shard_batch(IDS, mesh)
    compiled = step.lower(params, state, opt_state, batch).compile()
    assert set(collectives(compiled.as_text())) == expected
    losses = []
    for _ in range(3):
        new, new_state, value = compiled(params, state, opt_state, batch)
        for before, after in ((params, new), (opt_state, new_state)):
            for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
                assert y.sharding.is_equivalent_to(x.sharding, x.ndim)
        params, opt_state = new, new_state
        losses.append(float(value))
    np.testing.assert_allclose(losses, losses_on_one_device, rtol=1e-5)


def made_llama() -> torch.nn.Module:
    torch.manual_seed(0)
    return causal("Llama", **SAME)()


def step_of(net: Any) -> Any:
    @jax.jit
    def step(params, state, opt_state, ids):
        def loss(params):
            return net(params, state, input_ids=ids, labels=ids, use_cache=False)[0].loss

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = optax.adamw(1e-2).update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


@pytest.fixture(scope="module")
def losses_on_one_device() -> list[float]:
    net = jtbridge.module(made_llama())
    params, state = net.init()
    opt_state = optax.adamw(1e-2).init(params)
    losses = []
    step = step_of(net)
    for _ in range(3):
        params, opt_state, value = step(params, state, opt_state, IDS)
        losses.append(float(value))
    return losses


def test_tensor_parallel_forward_has_expected_number_of_all_reduces():
    net = jtbridge.module(made_llama())
    mesh = mesh_of(8)
    params, state = net.init(mesh=mesh, rules="tensor")
    logits = jax.jit(lambda params, state, ids: net(params, state, ids, use_cache=False)[0].logits)
    text = logits.lower(params, state, jtbridge.shard_batch(IDS, mesh)).compile().as_text()
    assert collectives(text) == {"all-reduce": 3}
