"""`jtbridge.generate` against `model.generate` of transformers."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

transformers = pytest.importorskip("transformers")
from . import language_models  # noqa: E402  (it needs transformers)
from .language_models import net_of, prompts, torch_tokens  # noqa: E402

pytestmark = language_models.IGNORED_WARNINGS
MODELS = {**language_models.CAUSAL, **language_models.WITH_ENCODER}


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "new"), [(5, 24), (20, 8)])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_of_padded_prompts_match_transformers(name: str, length: int, new: int):
    model, net, params, state = net_of(MODELS[name])
    mask = np.ones((3, length), int)
    mask[1, -2:] = 0  # an encoder is padded on the right, a decoder on the left
    mask = mask if name in language_models.WITH_ENCODER else mask[:, ::-1].copy()
    ids = np.where(mask, prompts(length), 0)
    expected = torch_tokens(model, ids, mask, max_new_tokens=new)
    assert len(np.unique(expected[:, -new:])) > 5  # a model that repeats tokens would hide errors
    actual = jtbridge.generate(net, params, state, ids, attention_mask=mask, max_new_tokens=new)
    np.testing.assert_array_equal(actual, expected)


BEAMS: list[dict[str, Any]] = [{}, {"early_stopping": True, "length_penalty": 2.0}, {"early_stopping": "never"}]


@pytest.mark.parametrize(
    ("name", "options"), [*itertools.product(["llama", "mistral", "mamba", "t5", "bart"], BEAMS), ("zamba2", {})]
)
def test_beam_search_finds_the_sequences_of_transformers(name: str, options: dict[str, Any]):
    model, net, params, state = net_of(MODELS[name])
    ids = prompts(6)
    options = options | {"max_new_tokens": 10, "num_beams": 3, "eos_token_id": [2, 7, 11, 30]}
    actual = jtbridge.generate(net, params, state, ids, **options)
    expected = torch_tokens(model, ids, **options)
    ended = np.cumsum(np.isin(expected, [2, 7, 11, 30])[:, -10:], 1) > 1  # transformers fills with the first end token
    np.testing.assert_array_equal(np.asarray(actual)[:, -10:][~ended], expected[:, -10:][~ended])


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "min_new_tokens": {"min_new_tokens": 7, "eos_token_id": list(range(2, 40))},
    "eos_token_id": {"eos_token_id": [2, *range(20, 50)]},
    "min_length": {"config": {"min_length": 14}, "eos_token_id": list(range(2, 40))},
    "forced_eos_token_id": {"config": {"forced_eos_token_id": 9}},
    "suppress_tokens": {"config": {"suppress_tokens": list(range(3, 50))}},
    "begin_suppress_tokens": {"config": {"begin_suppress_tokens": list(range(3, 62))}},
}


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_match_transformers(name: str, beams: int):
    model, net, params, state = net_of(language_models.llama)
    options = dict(CONSTRAINTS[name])
    ids = prompts(6)
    plain = torch_tokens(model, ids, max_new_tokens=10)
    for key, value in options.pop("config", {}).items():
        setattr(model.generation_config, key, value)
    options |= {"max_new_tokens": 10, "num_beams": beams, "pad_token_id": 0}
    expected = torch_tokens(model, ids, **options)
    assert beams > 1 or (expected != plain).any()
    actual = np.asarray(jtbridge.generate(net, params, state, ids, **options))
    ends = np.isin(expected[:, 6:], options.get("eos_token_id", [2]))
    counted = np.cumsum(ends, 1) - ends == 0
    np.testing.assert_array_equal(actual[:, 6:][counted], expected[:, 6:][counted])


def test_forced_first_token_with_an_encoder():
    model, net, params, state = net_of(language_models.bart)
    model.generation_config.forced_bos_token_id = 17
    expected = torch_tokens(model, prompts(6), max_new_tokens=6)
    actual = jtbridge.generate(net, params, state, prompts(6), max_new_tokens=6)
    assert (expected[:, 1] == 17).all()
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("beams", [1, 2])
def test_decoder_gets_all_results_of_its_encoder(beams: int):
    model, net, params, state = net_of(language_models.moonshine)
    sound = np.random.default_rng(0).normal(size=(2, 4000)).astype(np.float32)
    mask = np.ones((2, 4000), int)
    mask[1, 1500:] = 0
    options = {"max_new_tokens": 6, "num_beams": beams, "eos_token_id": -1, "pad_token_id": 0}
    expected = torch_tokens(model, sound, mask, **options)
    assert (torch_tokens(model, sound, **options)[1] != expected[1]).any()
    actual = jtbridge.generate(net, params, state, sound, attention_mask=mask, **options)
    np.testing.assert_array_equal(actual, expected)


def test_attention_mask_is_derived_from_padding_tokens():
    model, net, params, state = net_of(language_models.llama)
    ids = prompts(6)
    ids[0, :3] = 0
    expected = torch_tokens(model, ids, max_new_tokens=8)
    np.testing.assert_array_equal(jtbridge.generate(net, params, state, ids, max_new_tokens=8), expected)


def test_attention_mask_is_derived_from_a_given_padding_token():
    model, net, params, state = net_of(language_models.llama)
    model.generation_config.pad_token_id = None
    ids = prompts(6)
    ids[0, :3] = 0
    expected = torch_tokens(model, ids, max_new_tokens=8, pad_token_id=0)
    actual = jtbridge.generate(net, params, state, ids, max_new_tokens=8, pad_token_id=0)
    np.testing.assert_array_equal(actual, expected)


def test_penalty_includes_masked_tokens_as_in_transformers():
    model, net, params, state = net_of(language_models.llama)
    ids = np.array([[0, 0, 7, 12, 12, 12], [9, 9, 50, 51, 52, 53]])
    ids[1, 2:5] = torch_tokens(model, ids[1:], max_new_tokens=3, pad_token_id=0)[0, 6:]  # probable ones
    mask = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 1]])
    options = {"max_new_tokens": 12, "repetition_penalty": 3.0, "pad_token_id": 0}
    expected = torch_tokens(model, ids, mask, **options)
    actual = jtbridge.generate(net, params, state, ids, attention_mask=mask, **options)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 30])
@pytest.mark.parametrize("name", ["llama", "mamba", "bart", "t5"])
def test_no_repeated_ngrams_as_in_transformers(name: str, size: int, beams: int):
    model, net, params, state = net_of(MODELS[name])
    ids = np.array([[0, 0, 0, 7, 9, 7], [9, 7, 12, 9, 12, 7], [5, 5, 5, 5, 5, 5]])  # few tokens, which repeat
    options = {"max_new_tokens": 16, "num_beams": beams, "no_repeat_ngram_size": size, "eos_token_id": -1}
    mask = np.ones_like(ids) if name in language_models.WITH_ENCODER else (ids != 0).astype(int)
    expected = torch_tokens(model, ids, mask, **options, pad_token_id=0)
    tokens = jtbridge.generate(net, params, state, ids, attention_mask=mask, **options, pad_token_id=0)
    np.testing.assert_array_equal(tokens, expected)


def test_prompts_of_different_lengths_share_one_program():
    model, net, params, state = net_of(language_models.llama)
    options = {"max_new_tokens": 10, "no_repeat_ngram_size": 2}
    for length in (3, 9, 16):
        ids = prompts(length)
        ids[:, 1] = 0  # as the padding that makes lengths equal, but a token of the prompt
        mask = np.ones_like(ids)
        tokens = jtbridge.generate(net, params, state, ids, attention_mask=mask, **options)
        np.testing.assert_array_equal(tokens, torch_tokens(model, ids, mask, **options))
    (program,) = net._programs._programs.values()
    assert program._cache_size() == 1


def test_min_new_tokens_overrides_min_length():
    model, net, params, state = net_of(language_models.llama)
    model.generation_config.min_length = 30
    options = {"max_new_tokens": 10, "min_new_tokens": 1, "eos_token_id": [2, *range(20, 50)]}
    expected = torch_tokens(model, prompts(6), **options)
    np.testing.assert_array_equal(jtbridge.generate(net, params, state, prompts(6), **options), expected)


# --- sampling -------------------------------------------------------------------------------------------------------


def test_sampling_scores_match_transformers():
    from jtbridge.models.generation._scores import warped

    scores = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32) * 3
    steps: list[tuple[dict[str, Any], Any]] = [
        ({"temperature": 0.6}, transformers.TemperatureLogitsWarper(0.6)),
        ({"top_k": 7}, transformers.TopKLogitsWarper(7)),
        ({"top_p": 0.6}, transformers.TopPLogitsWarper(0.6)),
        ({"min_p": 0.1}, transformers.MinPLogitsWarper(0.1)),
    ]
    together: dict[str, Any] = {}
    expected = torch.from_numpy(scores)
    for options, warper in steps:
        alone = {name: value for name, value in options.items() if name != "top_k"}
        actual = warped(jnp.asarray(scores), alone, options.get("top_k"))
        np.testing.assert_allclose(actual, warper(None, torch.from_numpy(scores)).numpy(), rtol=1e-6)
        expected = warper(None, expected)
        together |= options
    top_k = together.pop("top_k")
    np.testing.assert_allclose(warped(jnp.asarray(scores), together, top_k), expected.numpy(), rtol=1e-6)


def test_sampled_first_tokens_have_the_probabilities_of_the_model():
    model, net, params, state = net_of(language_models.llama)
    ids = np.repeat(prompts(4, rows=1), 4000, 0)
    with torch.no_grad():
        scores = model(torch.from_numpy(ids[:1])).logits[0, -1] / 2.0
    tokens = jtbridge.generate(net, params, state, ids, max_new_tokens=1, rng=jax.random.key(3), temperature=2.0)
    counts = np.bincount(np.asarray(tokens)[:, -1], minlength=64)
    expected = scores.softmax(-1).numpy() * 4000
    assert ((counts - expected) ** 2 / expected).sum() < 110  # the 99.98 % quantile of chi-squared with 63 degrees


def test_one_key_gives_the_same_tokens_and_another_key_others():
    _, net, params, state = net_of(language_models.llama)
    draw = lambda seed: np.asarray(  # noqa: E731
        jtbridge.generate(net, params, state, prompts(4), max_new_tokens=12, rng=jax.random.key(seed), top_k=20)
    )
    np.testing.assert_array_equal(draw(0), draw(0))
    assert (draw(0) != draw(1)).any()
    assert (draw(0)[0] != draw(0)[1]).any()


# --- programs -------------------------------------------------------------------------------------------------------


def test_prompts_of_a_bucket_and_other_temperatures_share_one_program():
    _, net, params, state = net_of(language_models.llama)
    for length in (3, 9, 16):
        for temperature in (0.5, 0.7):
            options = {"rng": jax.random.key(0), "temperature": temperature}
            jtbridge.generate(net, params, state, prompts(length), max_new_tokens=4, **options)
    (program,) = net._programs._programs.values()
    assert program._cache_size() == 1


def test_change_of_the_model_affects_the_next_call():
    model, net, params, state = net_of(language_models.llama)
    ids = prompts(5)
    before = np.asarray(jtbridge.generate(net, params, state, ids, max_new_tokens=6))
    handle = model.lm_head.register_forward_hook(lambda module, args, out: -out)
    changed = np.asarray(jtbridge.generate(net, params, state, ids, max_new_tokens=6))
    np.testing.assert_array_equal(changed, torch_tokens(model, ids, max_new_tokens=6))
    assert (changed != before).any()
    handle.remove()
    np.testing.assert_array_equal(jtbridge.generate(net, params, state, ids, max_new_tokens=6), before)
    model.generation_config.eos_token_id = int(before[0, 7])
    np.testing.assert_array_equal(
        jtbridge.generate(net, params, state, ids, max_new_tokens=6), torch_tokens(model, ids, max_new_tokens=6)
    )


def test_autocast_and_global_hooks_affect_the_next_call():
    model, net, params, state = net_of(language_models.llama)
    run = functools.partial(jtbridge.generate, net, params, state, prompts(5), max_new_tokens=24)
    before = np.asarray(run())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        changed = np.asarray(run())
        np.testing.assert_array_equal(jtbridge.generate(jtbridge.module(model), *run.args[1:], **run.keywords), changed)
    assert (changed != before).any()
    np.testing.assert_array_equal(run(), before)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: -out if isinstance(out, torch.Tensor) and out.shape[-1] == 64 else None
    )
    try:
        np.testing.assert_array_equal(run(), torch_tokens(model, prompts(5), max_new_tokens=24))
    finally:
        handle.remove()
    np.testing.assert_array_equal(run(), before)


def test_other_parameters_give_other_tokens_with_the_same_program():
    model, net, params, state = net_of(language_models.llama)
    other = jax.tree.map(lambda x: x * 0.7, params)
    tokens = jtbridge.generate(net, params, state, prompts(5), max_new_tokens=6)
    changed = jtbridge.generate(net, other, state, prompts(5), max_new_tokens=6)
    assert (tokens != changed).any()
    net.load(other, state)
    np.testing.assert_array_equal(changed, torch_tokens(model, prompts(5), max_new_tokens=6))
    (program,) = net._programs._programs.values()
    assert program._cache_size() == 1


def test_generation_within_a_program_of_the_user():
    model, net, params, state = net_of(language_models.mistral)
    ids = prompts(5)
    run = jax.jit(lambda params, ids: jtbridge.generate(net, params, state, ids, max_new_tokens=6))
    np.testing.assert_array_equal(run(params, ids), torch_tokens(model, ids, max_new_tokens=6))


def test_generation_without_jit():
    model, net, params, state = net_of(language_models.llama)
    with jax.disable_jit():
        actual = jtbridge.generate(net, params, state, prompts(5), max_new_tokens=4)
    np.testing.assert_array_equal(actual, torch_tokens(model, prompts(5), max_new_tokens=4))


def test_generation_after_torch_released_its_weights():
    model = language_models.llama()
    expected = torch_tokens(model, prompts(5), max_new_tokens=6)
    net = jtbridge.module(model)
    params, state = net.init(release=True)
    np.testing.assert_array_equal(jtbridge.generate(net, params, state, prompts(5), max_new_tokens=6), expected)


def test_generation_in_bfloat16():
    model = language_models.llama().to(torch.bfloat16)
    net = jtbridge.module(model)
    params, state = net.init()
    tokens = np.asarray(jtbridge.generate(net, params, state, prompts(5), max_new_tokens=3))
    expected = torch_tokens(model, prompts(5), max_new_tokens=3)
    assert (tokens[:, 5] == expected[:, 5]).all()


# --- adapters -------------------------------------------------------------------------------------------------------


def test_adapters_are_used_and_may_be_switched_off():
    peft = pytest.importorskip("peft")
    base = language_models.llama()
    lora = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    net = jtbridge.module(lora.eval())
    params, state = net.init()
    with_adapters = np.asarray(jtbridge.generate(net, params, state, prompts(5), max_new_tokens=8))
    np.testing.assert_array_equal(with_adapters, torch_tokens(base, prompts(5), max_new_tokens=8))
    with lora.disable_adapter():
        without = np.asarray(jtbridge.generate(net, params, state, prompts(5), max_new_tokens=8))
        np.testing.assert_array_equal(without, torch_tokens(base, prompts(5), max_new_tokens=8))
    assert (with_adapters != without).any()


def test_beam_search_with_mostly_end_tokens():
    _, net, params, state = net_of(language_models.llama)
    ids = prompts(4)
    tokens = jtbridge.generate(
        net, params, state, ids, max_new_tokens=4, num_beams=2, eos_token_id=list(range(64)), pad_token_id=0
    )
    assert (np.asarray(tokens)[:, 5:] == 0).all()
