"""`jtbridge.generate` against `model.generate` of transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import ArgumentError, ModelError

transformers = pytest.importorskip("transformers")
from . import language_models  # noqa: E402  (it needs transformers)

transformers.logging.set_verbosity_error()
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
MODELS = {**language_models.CAUSAL, **language_models.WITH_ENCODER}


def net_of(make: Callable[[], Any]) -> tuple[Any, Any, Any, Any]:
    model = make()
    net = jtbridge.module(model)
    return model, net, *net.init()


def prompts(length: int, rows: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 64, (rows, length))


def torch_tokens(model: Any, ids: np.ndarray, mask: np.ndarray | None = None, **options: Any) -> np.ndarray:
    """Return the tokens of transformers, with padding up to the most there can be."""
    given = {} if mask is None else {"attention_mask": torch.from_numpy(mask)}
    with torch.no_grad():
        tokens = model.generate(torch.from_numpy(ids), **{"do_sample": False, **given, **options}).numpy()
    start = 1 if model.config.is_encoder_decoder else ids.shape[1]
    padded = np.zeros((tokens.shape[0], start + options["max_new_tokens"]), tokens.dtype)
    padded[:, : tokens.shape[1]] = tokens
    return padded


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "new"), [(5, 24), (20, 8)])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_of_padded_prompts_are_those_of_transformers(name: str, length: int, new: int):
    model, net, params, state = net_of(MODELS[name])
    mask = np.ones((3, length), int)
    mask[1, -2:] = 0  # an encoder is padded on the right, a decoder on the left
    mask = mask if name in language_models.WITH_ENCODER else mask[:, ::-1].copy()
    ids = np.where(mask, prompts(length), 0)
    expected = torch_tokens(model, ids, mask, max_new_tokens=new)
    assert len(np.unique(expected[:, -new:])) > 5  # a model that repeats itself would hide what is wrong
    actual = jtbridge.generate(net, params, state, ids, attention_mask=mask, max_new_tokens=new)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("options", [{}, {"early_stopping": True, "length_penalty": 2.0}, {"early_stopping": "never"}])
@pytest.mark.parametrize("name", ["llama", "mistral", "mamba", "t5", "bart"])
def test_beam_search_finds_the_sequences_of_transformers(name: str, options: dict[str, Any]):
    model, net, params, state = net_of(MODELS[name])
    ids = prompts(6)
    options |= {"max_new_tokens": 10, "num_beams": 3, "eos_token_id": [2, 7, 11, 30]}
    actual = jtbridge.generate(net, params, state, ids, **options)
    expected = torch_tokens(model, ids, **options)
    ended = np.cumsum(np.isin(expected, [2, 7, 11, 30])[:, -10:], 1) > 1  # transformers fills with the first end token
    np.testing.assert_array_equal(np.asarray(actual)[:, -10:][~ended], expected[:, -10:][~ended])


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "min_new_tokens": {"min_new_tokens": 7, "eos_token_id": list(range(2, 40))},
    "eos_token_id": {"eos_token_id": [2, *range(20, 50)]},
    "min_length": {"config": {"min_length": 14}, "eos_token_id": list(range(2, 40))},
    "forced_eos_token_id": {"config": {"forced_eos_token_id": 9}},
    "suppress_tokens": {"config": {"suppress_tokens": list(range(3, 50))}},
    "begin_suppress_tokens": {"config": {"begin_suppress_tokens": list(range(3, 62))}},
}


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_are_those_of_transformers(name: str, beams: int):
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


def test_a_forced_first_token_comes_first_behind_an_encoder():
    model, net, params, state = net_of(language_models.bart)
    model.generation_config.forced_bos_token_id = 17
    expected = torch_tokens(model, prompts(6), max_new_tokens=6)
    actual = jtbridge.generate(net, params, state, prompts(6), max_new_tokens=6)
    assert (expected[:, 1] == 17).all()
    np.testing.assert_array_equal(actual, expected)


def test_the_mask_of_a_prompt_is_read_off_its_padding():
    model, net, params, state = net_of(language_models.llama)
    ids = prompts(6)
    ids[0, :3] = 0
    expected = torch_tokens(model, ids, max_new_tokens=8)
    np.testing.assert_array_equal(jtbridge.generate(net, params, state, ids, max_new_tokens=8), expected)


def test_the_mask_is_read_off_a_padding_token_that_is_given():
    model, net, params, state = net_of(language_models.llama)
    model.generation_config.pad_token_id = None
    ids = prompts(6)
    ids[0, :3] = 0
    expected = torch_tokens(model, ids, max_new_tokens=8, pad_token_id=0)
    actual = jtbridge.generate(net, params, state, ids, max_new_tokens=8, pad_token_id=0)
    np.testing.assert_array_equal(actual, expected)


def test_a_masked_token_between_others_counts_for_the_penalty_as_in_transformers():
    model, net, params, state = net_of(language_models.llama)
    ids = np.array([[0, 0, 7, 12, 12, 12], [9, 9, 50, 51, 52, 53]])
    ids[1, 2:5] = torch_tokens(model, ids[1:], max_new_tokens=3, pad_token_id=0)[0, 6:]  # probable ones
    mask = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 1]])
    options = {"max_new_tokens": 12, "repetition_penalty": 3.0, "pad_token_id": 0}
    expected = torch_tokens(model, ids, mask, **options)
    actual = jtbridge.generate(net, params, state, ids, attention_mask=mask, **options)
    np.testing.assert_array_equal(actual, expected)


def test_a_least_number_of_new_tokens_takes_the_place_of_a_least_length():
    model, net, params, state = net_of(language_models.llama)
    model.generation_config.min_length = 30
    options = {"max_new_tokens": 10, "min_new_tokens": 1, "eos_token_id": [2, *range(20, 50)]}
    expected = torch_tokens(model, prompts(6), **options)
    np.testing.assert_array_equal(jtbridge.generate(net, params, state, prompts(6), **options), expected)


# --- sampling -------------------------------------------------------------------------------------------------------


def test_scores_to_sample_from_are_those_of_transformers():
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


def test_a_change_of_the_model_is_seen_by_the_next_call():
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


def test_autocast_and_hooks_of_all_modules_are_seen_by_the_next_call():
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


def test_other_parameters_are_other_tokens_of_the_same_program():
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


# --- tokens as they come --------------------------------------------------------------------------------------------


def test_a_stream_gets_every_token_in_order_and_may_end_the_generation():
    _, net, params, state = net_of(language_models.llama)
    come: list[np.ndarray] = []
    tokens = jtbridge.generate(net, params, state, prompts(5), max_new_tokens=8, stream=come.append)
    np.testing.assert_array_equal(np.stack(come, 1), np.asarray(tokens)[:, 5:])

    def three(step: np.ndarray) -> bool:
        come.append(step)
        return len(come) == 3

    come.clear()
    ended = np.asarray(jtbridge.generate(net, params, state, prompts(5), max_new_tokens=8, stream=three))
    assert len(come) == 3
    np.testing.assert_array_equal(ended[:, :8], np.asarray(tokens)[:, :8])
    assert (ended[:, 8:] == 0).all()


@pytest.mark.parametrize("true", [np.True_, np.array(True), torch.tensor(True)], ids=["NumPy", "array", "tensor"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_stream_ends_by_true_of_every_kind_and_by_nothing_else(true: Any, is_inside: bool):
    _, net, params, state = net_of(language_models.llama)

    def steps(answer: Any) -> int:
        come: list[np.ndarray] = []

        def stream(step: np.ndarray) -> Any:
            come.append(step)
            return answer

        generate = functools.partial(jtbridge.generate, net, params, state, max_new_tokens=4, stream=stream)
        jax.block_until_ready((jax.jit(generate) if is_inside else generate)(prompts(5)))
        jax.effects_barrier()
        return len(come)

    assert steps(true) == 1
    assert [steps(answer) for answer in (None, 1, np.ones(()), ~true)] == [4, 4, 4, 4]


def test_a_stream_that_returns_a_truth_for_each_sequence_is_refused():
    _, net, params, state = net_of(language_models.llama)
    with pytest.raises(ArgumentError, match=r"`stream` must return one bool.*of shape \(3,\)"):
        jtbridge.generate(net, params, state, prompts(5), max_new_tokens=4, stream=lambda step: step == 5)


def test_what_a_stream_raises_is_raised_and_the_next_call_works():
    _, net, params, state = net_of(language_models.llama)

    def fail(step: np.ndarray) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        jtbridge.generate(net, params, state, prompts(5), max_new_tokens=8, stream=fail)
    come: list[np.ndarray] = []
    jtbridge.generate(net, params, state, prompts(5), max_new_tokens=8, stream=come.append)
    assert len(come) == 8


def test_a_stream_within_a_program_of_the_user():
    _, net, params, state = net_of(language_models.llama)
    come: list[np.ndarray] = []
    run = jax.jit(lambda params, ids: jtbridge.generate(net, params, state, ids, max_new_tokens=4, stream=come.append))
    tokens = jax.block_until_ready(run(params, prompts(5)))
    jax.effects_barrier()
    np.testing.assert_array_equal(np.stack(come, 1), np.asarray(tokens)[:, 5:])


# --- errors ---------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"max_new_tokens": 0}, "`max_new_tokens` must be a whole number of at least 1"),
    "sampling without a key": ({"temperature": 0.5}, "`temperature` is for sampled tokens"),
    "a temperature of zero": ({"temperature": 0.0, "rng": jax.random.key(0)}, "`temperature` must be above 0"),
    "a temperature of JAX": ({"temperature": jnp.zeros(()), "rng": jax.random.key(0)}, "`temperature` must be above 0"),
    "temperatures": ({"temperature": np.ones(3), "rng": jax.random.key(0)}, r"one number for all.*has shape \(3,\)"),
    "top_p above one": ({"top_p": np.float32(1.5), "rng": jax.random.key(0)}, "`top_p` must be between 0 and 1"),
    "a text as a penalty": ({"num_beams": 2, "length_penalty": "1"}, "`length_penalty` must be one number"),
    "no number of tokens": ({"max_new_tokens": None}, "`max_new_tokens` must be a whole number"),
    "early stopping by a number": ({"num_beams": 2, "early_stopping": 1}, "`early_stopping` must be True, False"),
    "half a token": ({"eos_token_id": 2.5}, r"`eos_token_id` must be a token.*has 2\.5"),
    "tokens in tokens": ({"eos_token_id": [[2]]}, r"`eos_token_id` must be a token.*has \[2\]"),
    "two tokens for padding": ({"pad_token_id": [0, 1]}, "`pad_token_id` must be one token"),
    "a length penalty that is no number": (
        {"num_beams": 2, "length_penalty": np.nan},
        "`length_penalty` must be a real",
    ),
    "a complex temperature": ({"temperature": 1j, "rng": jax.random.key(0)}, "`temperature` must be a real number"),
    "a length penalty without beams": ({"length_penalty": 2.0}, "`length_penalty` is for beam search"),
    "early stopping of one beam": ({"early_stopping": True, "num_beams": 1}, "`early_stopping` is for beam search"),
    "more tokens at least than at most": ({"min_new_tokens": 5}, "5, which is more than `max_new_tokens`, 4"),
    "beams with a key": ({"num_beams": 2, "rng": jax.random.key(0)}, "takes no `rng`"),
    "beams with a stream": ({"num_beams": 2, "stream": print}, "takes no `stream`"),
    "padding on the right": ({"attention_mask": np.array([[1, 1, 1, 0]] * 3)}, "padded on the left"),
    "a mask that is added": ({"attention_mask": np.array([[-1e4, 0, 0, 0]] * 3)}, "must have 1 for each token that"),
    "a stream that is no function": ({"stream": 3}, "`stream` must be a function"),
    "do_sample": ({"do_sample": True}, r"no argument `do_sample`. Tokens are sampled if there is a key"),
    "a setting of the model": ({"min_length": 3}, r"Set `model.generation_config.min_length` instead"),
    "a setting that is not built": ({"no_repeat_ngram_size": 3}, r"`no_repeat_ngram_size`. Write the loop"),
    "a mask of another shape": ({"attention_mask": np.ones((3, 3), int)}, "must have the shape of the prompt"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_do_not_fit_are_refused(name: str):
    _, net, params, state = net_of(language_models.llama)
    options, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=message):
        jtbridge.generate(net, params, state, prompts(4), **{"max_new_tokens": 4, **options})


def test_prompts_that_are_no_tokens_of_the_model_are_refused():
    _, net, params, state = net_of(language_models.llama)
    with pytest.raises(ArgumentError, match="tokens 0 to 63, but the prompt has 70 to 70"):
        jtbridge.generate(net, params, state, np.array([[70]]), max_new_tokens=4)
    with pytest.raises(ArgumentError, match="integers of shape"):
        jtbridge.generate(net, params, state, np.array([3, 4]), max_new_tokens=4)


def test_more_tokens_than_learned_positions_are_refused():
    model, net, params, state = net_of(language_models.gpt2)
    np.testing.assert_array_equal(
        jtbridge.generate(net, params, state, prompts(100, rows=1), max_new_tokens=29),
        torch_tokens(model, prompts(100, rows=1), max_new_tokens=29),
    )
    with pytest.raises(ArgumentError, match=r"128 positions, but .* need 129"):
        jtbridge.generate(net, params, state, prompts(100, rows=1), max_new_tokens=30)


@pytest.mark.parametrize("name", ["suppress_tokens", "do_sample", "position_ids", "decoder_input_ids", "spelled_wrong"])
def test_further_arguments_that_the_model_does_not_take_are_refused(name: str):
    _, net, params, state = net_of(language_models.llama)
    further: dict[str, Any] = {name: np.ones((3, 4), int)}
    with pytest.raises(ArgumentError, match=f"takes no argument `{name}`"):
        jtbridge.generate(net, params, state, prompts(4), max_new_tokens=4, **further)


def test_a_padding_token_outside_the_vocabulary_is_refused():
    model, net, params, state = net_of(language_models.llama)
    model.generation_config.pad_token_id = -1
    with pytest.raises(ArgumentError, match="the padding token is -1"):
        jtbridge.generate(net, params, state, prompts(4), max_new_tokens=4)


def test_models_whose_attention_depends_on_the_length_of_the_cache_are_refused():
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 64}
    config = transformers.GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 1]], window_size=4)
    net = jtbridge.module(transformers.GPTNeoForCausalLM(config))
    with pytest.raises(ModelError, match="needs a cache that grows"):
        jtbridge.generate(net, *net.init(), prompts(12), max_new_tokens=8)


@pytest.mark.parametrize("name", ["bart", "m2m100"])
def test_more_tokens_than_the_positions_behind_an_encoder_are_refused(name: str):
    _, net, params, state = net_of(MODELS[name])
    for length, new in ((130, 4), (4, 130)):
        with pytest.raises(ArgumentError, match=r"128 positions, but .* need 130"):
            jtbridge.generate(net, params, state, prompts(length, rows=1), max_new_tokens=new)


def test_settings_of_a_model_that_are_not_built_are_refused_by_name():
    model, net, params, state = net_of(language_models.llama)
    model.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(ModelError, match="`no_repeat_ngram_size` to 2"):
        jtbridge.generate(net, params, state, prompts(4), max_new_tokens=4)


def test_what_is_no_language_model_is_refused():
    net = jtbridge.module(torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match="no `generation_config`"):
        jtbridge.generate(net, *net.init(), np.array([[1]]), max_new_tokens=4)
    not_wrapped: Any = torch.nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match=r"takes the result of `jtbridge\.module"):
        jtbridge.generate(not_wrapped, {}, {}, np.array([[1]]), max_new_tokens=4)


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


# --- kinds of arguments ---------------------------------------------------------------------------------------------


def made_of(values: list[int]) -> dict[str, Any]:
    """Return tokens as values of other kinds."""
    return {"tensor": torch.tensor(values), "NumPy": np.array(values), "JAX": jnp.array(values)}


@pytest.mark.parametrize("kind", ["tensor", "NumPy", "JAX"])
def test_numbers_of_every_kind_are_taken(kind: str):
    _, net, params, state = net_of(language_models.llama)
    generate = functools.partial(jtbridge.generate, net, params, state)
    expected = generate(prompts(4), max_new_tokens=6, eos_token_id=5, pad_token_id=0, num_beams=2)
    five, zero, two, six = made_of([5, 0, 2, 6])[kind]
    found = generate(prompts(4), max_new_tokens=six, eos_token_id=five, pad_token_id=zero, num_beams=two)
    np.testing.assert_array_equal(found, expected)
    several = generate(prompts(4), max_new_tokens=6, eos_token_id=made_of([5, 5, 2])[kind])
    np.testing.assert_array_equal(several, generate(prompts(4), max_new_tokens=6, eos_token_id=[5, 2]))


def test_prompts_without_a_sign_are_taken():
    _, net, params, state = net_of(language_models.llama)
    ids = prompts(4)
    found = jtbridge.generate(net, params, state, ids.astype(np.uint32), max_new_tokens=4)
    np.testing.assert_array_equal(found, jtbridge.generate(net, params, state, ids, max_new_tokens=4))


def test_a_key_that_is_none_is_refused():
    _, net, params, state = net_of(language_models.llama)
    with pytest.raises(ArgumentError, match="`rng` must be a JAX key"):
        jtbridge.generate(net, params, state, prompts(4), max_new_tokens=4, rng=0)


def test_settings_that_change_no_tokens_are_taken():
    model, net, params, state = net_of(language_models.t5)
    expected = jtbridge.generate(net, params, state, prompts(4), max_new_tokens=4)
    model.generation_config.temperature = 0.0  # for samples
    model.generation_config.use_cache = False
    model.config.return_dict = False
    np.testing.assert_array_equal(jtbridge.generate(net, params, state, prompts(4), max_new_tokens=4), expected)


def test_beam_search_with_more_tokens_that_end_than_others():
    _, net, params, state = net_of(language_models.llama)
    ids = prompts(4)
    tokens = jtbridge.generate(
        net, params, state, ids, max_new_tokens=4, num_beams=2, eos_token_id=list(range(64)), pad_token_id=0
    )
    assert (np.asarray(tokens)[:, 5:] == 0).all()
