"""Models of `transformers`: norms, gates, rotary embeddings and losses become operators, and results are torch's."""

from __future__ import annotations

import collections
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from tests.kernels.harness import all_proven, kernels_in, needs_compiler, needs_triton

from .harness import assert_near, operators

transformers = pytest.importorskip("transformers")

VOCABULARY, LAYERS = 50, 2
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
GROUPED = {"num_key_value_heads": 1, "head_dim": 32}
OF_GEMMA4 = {
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
# The prefix of the class, its settings, and numbers: norms per layer and outside of layers, gates, and rotations.
MODELS: dict[str, tuple[dict[str, Any], int, int, int, int]] = {
    "Llama": (GROUPED, 2, 1, 1, 2),
    "Mistral": (GROUPED, 2, 1, 1, 2),
    "Qwen2": ({"num_key_value_heads": 1}, 2, 1, 1, 2),
    "Qwen3": (GROUPED, 4, 1, 1, 2),
    "Gemma": (GROUPED, 2, 1, 1, 2),
    "Gemma2": (GROUPED, 4, 1, 1, 2),
    "Gemma3Text": (GROUPED, 6, 1, 1, 2),
    "Gemma4Text": (GROUPED | OF_GEMMA4, 7, 2, 2, 2),
    "Llama4Text": (GROUPED | {"intermediate_size_mlp": 48, "attention_chunk_size": 16, "moe_layers": []}, 2, 1, 1, 2),
    "GPTNeoX": ({}, 0, 0, 0, 2),
    "Phi": ({}, 0, 0, 0, 2),
    # Their rotations are of neighbours: in a part of the dimensions, and in float32.
    "Glm": (GROUPED | {"pad_token_id": 0, "eos_token_id": 1}, 2, 1, 1, 2),
    "Cohere": ({"num_key_value_heads": 1}, 0, 0, 1, 2),
    "Cohere2": ({"num_key_value_heads": 1}, 0, 0, 1, 2),
    "Ernie4_5": (GROUPED, 2, 1, 1, 2),
}
CENTERED_NORMS = {"Cohere": LAYERS + 1, "Cohere2": LAYERS + 1}
UNSCALED_NORMS = {"Gemma4Text": LAYERS, "Llama4Text": 2 * LAYERS}
LAYER_NORMS = {"GPTNeoX": 2 * LAYERS + 1, "Phi": LAYERS + 1}
models = pytest.mark.parametrize("name", MODELS)
some_models = pytest.mark.parametrize("name", ["Llama", "Gemma", "GPTNeoX"])
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def model(name: str, dtype: str = "float32", **more: Any) -> torch.nn.Module:
    settings = MODELS[name][0]
    config = getattr(transformers, f"{name}Config")(**SIZES, **settings, **more)
    torch.manual_seed(0)
    made = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval().to(getattr(torch, dtype))
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if "norm" in key:  # which are ones or zeros
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return made


def tokens(rows: int = 2) -> tuple[jax.Array, jax.Array]:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (rows, 7))
    labels = np.where(np.arange(7) < 2, -100, ids)
    return jnp.asarray(ids, jnp.int32), jnp.asarray(labels, jnp.int32)


def losses(name: str, dtype: str = "float32", **more: Any) -> Any:
    """Return a model's loss as a function of its parameters, for JAX and for torch, and the parameters."""
    made = model(name, dtype, **more)

    def of_torch(parameters, ids, labels):
        return torch.func.functional_call(made, parameters, (ids,), {"labels": labels}).loss

    parameters = {key: p.detach().clone() for key, p in made.named_parameters()}
    return jtbridge.wrap(of_torch, backend="xla"), of_torch, parameters


def expected(name: str) -> dict[str, int]:
    _, norms, more_norms, gates, rotations = MODELS[name]
    counts = {
        "jtbridge.rms_norm": norms * LAYERS + more_norms,
        "jtbridge.unscaled_rms_norm": UNSCALED_NORMS.get(name, 0),
        "jtbridge.centered_norm": CENTERED_NORMS.get(name, 0),
        "jtbridge.gated": gates * LAYERS,
        "jtbridge.rope": rotations * LAYERS,
        "jtbridge.cross_entropy": 1,
    }
    return {key: count for key, count in counts.items() if count}


@models
@dtypes
def test_operators(name, dtype):
    made = model(name, dtype)
    assert operators(lambda ids, labels: made(ids, labels=labels).loss, *tokens()) == expected(name)


@needs_triton
@needs_compiler
@models
@dtypes
def test_kernels(name, dtype):
    _, of_torch, parameters = losses(name, dtype)
    f, arrays = jtbridge.wrap(of_torch), jtbridge.to_jax(parameters)
    counts = expected(name)
    names = {"rope": "rope_rotate", "gated": "gated_forward", "cross_entropy": "cross_entropy_forward"}
    wanted = {kernel: counts.get(f"jtbridge.{key}", 0) for key, kernel in names.items()}
    written_out = (counts.get(f"jtbridge.{key}", 0) for key in ("rms_norm", "unscaled_rms_norm", "centered_norm"))
    wanted["norm_forward"] = sum(written_out) + LAYER_NORMS.get(name, 0)
    with all_proven():
        forward = collections.Counter(kernels_in(f, arrays, *tokens()))
        both = collections.Counter(kernels_in(jax.grad(f), arrays, *tokens()))
    assert {key: forward[key] for key in wanted} == wanted
    backward = {key.replace("forward", "backward"): count for key, count in wanted.items()}
    backward["rope_rotate"] *= 2
    assert {key: both[key] for key in wanted | backward} == wanted | backward


@models
@dtypes
def test_values_and_gradients(name, dtype):
    f, of_torch, parameters = losses(name, dtype)
    ids, labels = tokens()
    value, grads = jax.jit(jax.value_and_grad(f))(jtbridge.to_jax(parameters), ids, labels)
    for p in parameters.values():
        p.requires_grad_()
    want = of_torch(parameters, jtbridge.to_torch(ids).long(), jtbridge.to_torch(labels).long())
    assert_near([value], [want], 20)
    of_parameters = torch.autograd.grad(want, list(parameters.values()))
    for key, grad in zip(parameters, of_parameters, strict=True):
        assert_near([grads[key]], [grad], 40 if dtype == "float32" else 20)


@some_models
def test_directional_derivatives(name):
    """First derivatives forward, second derivatives in reverse and in forward over reverse."""
    f, of_torch, parameters = losses(name, attn_implementation="eager")  # torch has no second derivative of the others
    ids, labels = tokens()
    arrays = jtbridge.to_jax(parameters)
    directions = {key: 0.1 * torch.randn(p.shape) for key, p in parameters.items()}
    along = jtbridge.to_jax(directions)

    def slope(p):
        return jax.jvp(lambda p: f(p, ids, labels), (p,), (along,))[1]

    def slope_of_reverse(p):
        grads = jax.grad(f)(p, ids, labels)
        return sum((jnp.vdot(grads[key], along[key]) for key in along), jnp.zeros(()))

    for p in parameters.values():
        p.requires_grad_()
    loss = of_torch(parameters, jtbridge.to_torch(ids).long(), jtbridge.to_torch(labels).long())
    firsts = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
    want = sum((g * v).sum() for g, v in zip(firsts, directions.values(), strict=True))
    seconds = torch.autograd.grad(want, list(parameters.values()), allow_unused=True, materialize_grads=True)
    assert_near([jax.jit(slope)(arrays)], [want], 100)
    for derivative in (slope, slope_of_reverse):
        found = jax.jit(jax.grad(derivative))(arrays)
        for key, second in zip(parameters, seconds, strict=True):
            assert_near([found[key]], [second], 200)


@some_models
def test_a_batch_of_models(name):
    f, of_torch, parameters = losses(name)
    ids, labels = tokens()
    rows = {key: torch.stack([p, 1.1 * p]) for key, p in parameters.items()}
    got = jax.jit(jax.vmap(f, (0, None, None)))(jtbridge.to_jax(rows), ids, labels)
    given = jtbridge.to_torch(ids).long(), jtbridge.to_torch(labels).long()
    want = [of_torch({key: p[i] for key, p in rows.items()}, *given) for i in range(2)]
    assert_near([got], [torch.stack(want)], 20)
    grads = jax.jit(jax.vmap(jax.grad(f), (0, None, None)))(jtbridge.to_jax(rows), ids, labels)
    one = jax.jit(jax.grad(f))(jtbridge.to_jax({key: p[1] for key, p in rows.items()}), ids, labels)
    for key in one:
        np.testing.assert_allclose(grads[key][1], one[key], rtol=0, atol=1e-5 * float(jnp.abs(one[key]).max()))


def test_checkpointed_layers_match_torch():
    made = model("Llama").train()
    with warnings.catch_warnings():  # its name changes with versions of transformers
        warnings.simplefilter("ignore")
        made.gradient_checkpointing_enable({"use_reentrant": False})

    def f(parameters, ids, labels):
        return torch.func.functional_call(made, parameters, (ids,), {"labels": labels, "use_cache": False}).loss

    parameters = {key: p.detach().clone() for key, p in made.named_parameters()}
    ids, labels = tokens()
    grads = jax.jit(jax.grad(jtbridge.wrap(f, backend="xla")))(jtbridge.to_jax(parameters), ids, labels)
    for p in parameters.values():
        p.requires_grad_()
    loss = f(parameters, jtbridge.to_torch(ids).long(), jtbridge.to_torch(labels).long())
    for key, grad in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True):
        assert_near([grads[key]], [grad], 40)


@dtypes
def test_t5_with_an_explicit_gelu(dtype):
    """T5 v1.1, whose GELU and loss are rounded after each step in half precision, as ours are not."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 32, "d_ff": 48, "num_layers": LAYERS, "num_heads": 2}
    torch.manual_seed(0)
    config = transformers.T5Config(**sizes, feed_forward_proj="gated-gelu", decoder_start_token_id=0)
    made = transformers.T5ForConditionalGeneration(config).eval().to(getattr(torch, dtype))

    def f(ids, labels):
        return made(ids, labels=labels).loss

    norms = 2 * LAYERS + 1 + 3 * LAYERS + 1
    others = {"jtbridge.gated": 2 * LAYERS, "jtbridge.cross_entropy": 1} if dtype == "float32" else {}
    assert operators(f, *tokens()) == {"jtbridge.rms_norm": norms, **others}
    with torch.no_grad():
        want = f(*(jtbridge.to_torch(x).long() for x in tokens()))
    assert_near([jax.jit(jtbridge.wrap(f, backend="xla"))(*tokens())], [want], 20)


@dtypes
def test_gptj_with_tokens_before_heads(dtype):
    sizes = {"n_embd": 64, "n_layer": LAYERS, "n_head": 2, "n_positions": 32, "rotary_dim": 16}
    torch.manual_seed(0)
    made = transformers.GPTJForCausalLM(transformers.GPTJConfig(vocab_size=VOCABULARY, **sizes)).eval()
    made = made.to(getattr(torch, dtype))

    def f(ids, labels):
        return made(ids, labels=labels).loss

    assert operators(f, *tokens()) == {"jtbridge.rope": 2 * LAYERS, "jtbridge.cross_entropy": 1}
    with torch.no_grad():
        want = f(*(jtbridge.to_torch(x).long() for x in tokens()))
    assert_near([jax.jit(jtbridge.wrap(f, backend="xla"))(*tokens())], [want], 20)
