"""Arguments of `jtbridge.generate`: every kind that is accepted, and arguments that are refused."""

from __future__ import annotations

import functools
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
from .language_models import net_of, prompts, torch_tokens  # noqa: E402

pytestmark = language_models.IGNORED_WARNINGS


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
    "a setting that is not built": ({"bad_words_ids": [[3]]}, r"`bad_words_ids`. Write the loop"),
    "half a number of tokens": ({"no_repeat_ngram_size": 1.5}, "`no_repeat_ngram_size` must be a whole number"),
    "a mask of another shape": ({"attention_mask": np.ones((3, 3), int)}, "must have the shape of the prompt"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_do_not_fit_are_refused(name: str):
    _, net, params, state = net_of(language_models.llama)
    options, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=message):
        jtbridge.generate(net, params, state, prompts(4), **{"max_new_tokens": 4, **options})


def test_prompts_outside_the_vocabulary_are_refused():
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
def test_unknown_model_arguments_are_refused(name: str):
    _, net, params, state = net_of(language_models.llama)
    further: dict[str, Any] = {name: np.ones((3, 4), int)}
    with pytest.raises(ArgumentError, match=f"takes no argument `{name}`"):
        jtbridge.generate(net, params, state, prompts(4), max_new_tokens=4, **further)


def test_a_padding_token_outside_the_vocabulary_is_refused():
    model, net, params, state = net_of(language_models.llama)
    model.generation_config.pad_token_id = -1
    with pytest.raises(ArgumentError, match="the padding token is -1"):
        jtbridge.generate(net, params, state, prompts(4), max_new_tokens=4)


def test_models_with_cache_length_dependent_attention_are_refused():
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 64}
    config = transformers.GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 1]], window_size=4)
    net = jtbridge.module(transformers.GPTNeoForCausalLM(config))
    with pytest.raises(ModelError, match="needs a cache that grows"):
        jtbridge.generate(net, *net.init(), prompts(12), max_new_tokens=8)


def test_a_falcon_whose_positions_are_biases_of_attention_is_refused():
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.FalconConfig(**sizes, alibi=True, new_decoder_architecture=False)
    net = jtbridge.module(transformers.FalconForCausalLM(config))
    with pytest.raises(ModelError, match="`alibi`"):
        jtbridge.generate(net, *net.init(), prompts(4), max_new_tokens=4)


@pytest.mark.parametrize("name", ["bart", "m2m100"])
def test_more_tokens_than_decoder_positions_are_refused(name: str):
    _, net, params, state = net_of(language_models.WITH_ENCODER[name])
    for length, new in ((130, 4), (4, 130)):
        with pytest.raises(ArgumentError, match=r"128 positions, but .* need 130"):
            jtbridge.generate(net, params, state, prompts(length, rows=1), max_new_tokens=new)


def test_unsupported_generation_settings_are_refused_by_name():
    model, net, params, state = net_of(language_models.llama)
    model.generation_config.encoder_no_repeat_ngram_size = 2
    with pytest.raises(ModelError, match="`encoder_no_repeat_ngram_size` to 2"):
        jtbridge.generate(net, params, state, prompts(4), max_new_tokens=4)


def test_models_without_generation_are_refused():
    net = jtbridge.module(torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match="no `generation_config`"):
        jtbridge.generate(net, *net.init(), np.array([[1]]), max_new_tokens=4)
    not_wrapped: Any = torch.nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match=r"takes the result of `jtbridge\.module"):
        jtbridge.generate(not_wrapped, {}, {}, np.array([[1]]), max_new_tokens=4)


# --- kinds of arguments -----------------------------------------------------------------------------------------------


def made_of(values: list[int]) -> dict[str, Any]:
    """Return tokens as values of different kinds."""
    return {"tensor": torch.tensor(values), "NumPy": np.array(values), "JAX": jnp.array(values)}


@pytest.mark.parametrize("kind", ["tensor", "NumPy", "JAX"])
def test_numbers_of_every_type_are_accepted(kind: str):
    _, net, params, state = net_of(language_models.llama)
    generate = functools.partial(jtbridge.generate, net, params, state)
    expected = generate(prompts(4), max_new_tokens=6, eos_token_id=5, pad_token_id=0, num_beams=2)
    five, zero, two, six = made_of([5, 0, 2, 6])[kind]
    found = generate(prompts(4), max_new_tokens=six, eos_token_id=five, pad_token_id=zero, num_beams=two)
    np.testing.assert_array_equal(found, expected)
    several = generate(prompts(4), max_new_tokens=6, eos_token_id=made_of([5, 5, 2])[kind])
    np.testing.assert_array_equal(several, generate(prompts(4), max_new_tokens=6, eos_token_id=[5, 2]))


def test_unsigned_prompts_are_accepted():
    _, net, params, state = net_of(language_models.llama)
    ids = prompts(4)
    found = jtbridge.generate(net, params, state, ids.astype(np.uint32), max_new_tokens=4)
    np.testing.assert_array_equal(found, jtbridge.generate(net, params, state, ids, max_new_tokens=4))


def test_invalid_key_is_refused():
    _, net, params, state = net_of(language_models.llama)
    with pytest.raises(ArgumentError, match="`rng` must be a JAX key"):
        jtbridge.generate(net, params, state, prompts(4), max_new_tokens=4, rng=0)


def test_settings_that_change_no_tokens_are_accepted():
    model, net, params, state = net_of(language_models.t5)
    expected = jtbridge.generate(net, params, state, prompts(4), max_new_tokens=4)
    model.generation_config.temperature = 0.0  # for samples
    model.generation_config.use_cache = False
    model.config.return_dict = False
    np.testing.assert_array_equal(jtbridge.generate(net, params, state, prompts(4), max_new_tokens=4), expected)
