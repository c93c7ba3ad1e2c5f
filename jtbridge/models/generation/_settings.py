"""The settings that a model's ``generation_config`` and the arguments of `generate` give."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax.core
import numpy as np

from jtbridge.errors import ArgumentError, ModelError
from jtbridge.models._whole_numbers import as_whole_number

# Settings of transformers that change tokens and are not supported here, with the values that turn them off.
_UNSUPPORTED = {
    "guidance_scale": (None, 1, 1.0),
    "sequence_bias": (None,),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "num_return_sequences": (None, 1),
    "stop_strings": (None,),
    "max_time": (None,),
    "forced_decoder_ids": (None,),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "renormalize_logits": (None, False),
    "remove_invalid_values": (None, False),
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0.0),
    "constraints": (None,),
    "force_words_ids": (None,),
    "token_healing": (None, False),
    "cache_implementation": (None, "static", "hybrid", "offloaded", "dynamic"),
}
_UNSUPPORTED_FOR_SAMPLING = {
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "top_h": (None,),
}
# The settings that are arguments of a compiled program, with the values that turn them off.
_MIN_POSITIVE = float(np.finfo(np.float32).tiny)  # smaller numbers are 0 for XLA
_CONTROLS = {"repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "min_p": None}
_WHOLE = {"max_new_tokens": 1, "min_new_tokens": 0, "num_beams": 1, "top_k": 0, "no_repeat_ngram_size": 0}  # minima
# Settings that are read from the model only, and are not arguments of `generate`.
OF_THE_MODEL = frozenset(
    {"bos_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "min_length"}
    | {"suppress_tokens", "begin_suppress_tokens"}
)
_FOR_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_FOR_BEAM_SEARCH = ("length_penalty", "early_stopping")


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """The settings that a program is compiled for.

    Attributes:
        max_new_tokens: the largest number of tokens to generate.
        min_new_tokens: the number of tokens before which no sequence ends.
        num_beams: the sequences that beam search keeps; 1 without it.
        early_stopping: when beam search ends, as in transformers: True, False or "never".
        top_k: the number of tokens to sample from; None for all.
        unrepeated: the length of n-grams of tokens that no sequence has twice; 0 without this limit.
        eos: the tokens that end a sequence.
        pad: the token that fills a sequence after its end.
        forced_first: the first token, if it is forced.
        forced_last: the tokens that may be the last one; empty if it is not forced.
        suppressed: tokens that are never generated.
        suppressed_first: tokens that are not generated first, or after the forced first token.
    """

    max_new_tokens: int
    min_new_tokens: int
    num_beams: int
    early_stopping: bool | str
    top_k: int | None
    unrepeated: int
    eos: tuple[int, ...]
    pad: int
    forced_first: int | None
    forced_last: tuple[int, ...]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]


def settings_of(
    config: Any, given: dict[str, Any], *, length: int, sampled: bool, vocabulary: int
) -> tuple[GenerationSettings, dict[str, Any]]:
    """Return the settings, and the numbers that a program takes as arguments.

    Args:
        config: the ``generation_config`` of the model.
        given: the arguments of `generate` by name. For None, the setting of `config` is used.
        length: the number of tokens in the prompt of the decoder.
        sampled: whether tokens are sampled.
        vocabulary: the size of the vocabulary.

    Raises:
        ArgumentError: a number is out of range, an argument for sampling is given without a key, or one for beam search
            without beams.
        ModelError: `config` asks for something that is not supported.
    """
    chosen = _chosen_arguments(config, given, sampled)
    ends = _as_tokens("eos_token_id", chosen["eos_token_id"])
    eos = tuple(token for token in ends if 0 <= token < vocabulary)  # -1 means that no token ends a sequence
    pads = _as_tokens("pad_token_id", chosen["pad_token_id"])
    if len(pads) > 1:
        raise ArgumentError(f"`pad_token_id` must be one token, but it is {chosen['pad_token_id']!r}.")
    top_k = chosen["top_k"] if sampled and chosen["top_k"] else None
    least = chosen["min_new_tokens"]
    if least is None:
        least = max(0, (getattr(config, "min_length", None) or 0) - length)
    forced_first, forced_last, suppressed, suppressed_first = (
        _known_tokens(config, name, vocabulary)
        for name in ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")
    )
    settings = GenerationSettings(
        max_new_tokens=chosen["max_new_tokens"],
        min_new_tokens=least,
        num_beams=chosen["num_beams"],
        early_stopping=False if chosen["early_stopping"] is None else chosen["early_stopping"],
        top_k=top_k,
        unrepeated=chosen["no_repeat_ngram_size"] or 0,
        eos=eos,
        pad=pads[0] if pads else eos[0] if eos else 0,
        forced_first=forced_first[0] if forced_first and length == 1 else None,
        forced_last=forced_last,
        suppressed=suppressed,
        suppressed_first=suppressed_first,
    )
    return settings, _controls(chosen, length, sampled)


def _chosen_arguments(config: Any, given: dict[str, Any], sampled: bool) -> dict[str, Any]:
    """Return the arguments of `generate`, with the value of `config` for None; raise an error for unsupported ones."""
    if not sampled:
        _refuse_sampling(given)
    chosen: dict[str, Any] = {
        name: getattr(config, name, None) if value is None else value for name, value in given.items()
    }
    chosen |= {name: as_whole_number(chosen[name]) for name in _WHOLE}
    if isinstance(chosen["early_stopping"], np.bool_):
        chosen["early_stopping"] = bool(chosen["early_stopping"])
    _refuse_invalid_values({name: value for name, value in chosen.items() if sampled or name not in _FOR_SAMPLING})
    _refuse_unsupported(config, _UNSUPPORTED | (_UNSUPPORTED_FOR_SAMPLING if sampled else {}))
    if chosen["num_beams"] is None:
        chosen["num_beams"] = 1
    if chosen["num_beams"] == 1:
        _refuse_beam_search(given)
    if given["min_new_tokens"] is not None and chosen["min_new_tokens"] > chosen["max_new_tokens"]:
        raise ArgumentError(
            f"`min_new_tokens` is {chosen['min_new_tokens']}, which is more than `max_new_tokens`, "
            f"{chosen['max_new_tokens']}."
        )
    if chosen["num_beams"] > 1 and sampled:
        raise ArgumentError(
            "Beam search chooses the best tokens, so it takes no `rng`. Leave out `rng` or `num_beams`."
        )
    return chosen


def _controls(chosen: dict[str, Any], length: int, sampled: bool) -> dict[str, Any]:
    """Return the settings that a program takes as arguments, without settings that have no effect."""
    controls = {
        name: chosen[name]
        for name, off in _CONTROLS.items()
        if chosen[name] is not None and not _is(chosen[name], off) and (sampled or name not in _FOR_SAMPLING)
    }
    if chosen["num_beams"] > 1:
        controls["length_penalty"] = 1.0 if chosen["length_penalty"] is None else chosen["length_penalty"]
    if chosen["no_repeat_ngram_size"]:
        controls["prompt_length"] = length
    return controls


def _refuse_invalid_values(given: dict[str, Any]) -> None:
    """Raise an error for a setting of the wrong type, or out of range."""
    for name in given.keys() & _WHOLE:
        value, least = given[name], _WHOLE[name]
        may_be_none = name != "max_new_tokens"
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not ((is_whole and value >= least) or (value is None and may_be_none)):
            raise ArgumentError(f"`{name}` must be a whole number of at least {least}, but it is {value!r}.")
    early = given["early_stopping"]
    if not (early is None or isinstance(early, bool) or (isinstance(early, str) and early == "never")):
        raise ArgumentError(f'`early_stopping` must be True, False or "never", but it is {early!r}.')
    for name in ("temperature", "repetition_penalty", "top_p", "min_p", "length_penalty"):
        number = _known_number(name, given.get(name))
        if number is None:
            continue
        if name in ("temperature", "repetition_penalty") and not number >= _MIN_POSITIVE:
            raise ArgumentError(f"`{name}` must be above 0, in float32, but it is {given[name]!r}.")
        if name in ("top_p", "min_p") and not 0 <= number <= 1:
            raise ArgumentError(f"`{name}` must be between 0 and 1, but it is {given[name]!r}.")


def _known_number(name: str, value: Any) -> float | None:
    """Return a setting as a number; None if it is not given, or has no value while JAX traces."""
    if value is None:
        return None
    if isinstance(value, str) or np.ndim(value):
        shown = f"has shape {np.shape(value)}" if np.ndim(value) else f"is {value!r}"
        raise ArgumentError(f"`{name}` must be one number for all sequences, but it {shown}.")
    if isinstance(value, jax.core.Tracer):
        return None
    try:
        number = float(value)
    except TypeError:
        number = math.nan
    if math.isnan(number):
        raise ArgumentError(f"`{name}` must be a real number, but it is {value!r}.")
    return number


def _refuse_sampling(given: dict[str, Any]) -> None:
    for name in _FOR_SAMPLING:
        if given[name] is not None:
            raise ArgumentError(
                f"`{name}` is for sampled tokens, which need a key: pass `rng=jax.random.key(0)`. Without a key the "
                "most probable token is taken."
            )


def _refuse_beam_search(given: dict[str, Any]) -> None:
    for name in _FOR_BEAM_SEARCH:
        if given[name] is not None:
            raise ArgumentError(f"`{name}` is for beam search, which keeps several sequences: pass `num_beams=4`.")


def _refuse_unsupported(config: Any, names: dict[str, tuple[Any, ...]]) -> None:
    for name, off in names.items():
        value = getattr(config, name, None)
        if not any(_is(value, one) for one in off):
            raise ModelError(
                f"The `generation_config` of the model sets `{name}` to {value!r}, which `jtbridge.generate` does not "
                f"support. If you do not need it: `model.generation_config.{name} = {off[-1]!r}`."
            )


def _is(value: Any, other: Any) -> bool:
    return value is other or (isinstance(value, int | float) and isinstance(other, int | float) and value == other)


def _as_tokens(name: str, value: Any) -> tuple[int, ...]:
    """Return one token or several as a tuple, each once."""
    if value is None:
        return ()
    value = value.tolist() if hasattr(value, "tolist") else value  # an array or a tensor
    several = value if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    tokens = [as_whole_number(token) for token in several]
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ArgumentError(f"`{name}` must be a token, which is a whole number, or several, but has {token!r}.")
    return tuple(dict.fromkeys(tokens))


def _known_tokens(config: Any, name: str, vocabulary: int) -> tuple[int, ...]:
    """Return the tokens of a setting; raise an error for one that the model does not have."""
    found = _as_tokens(name, getattr(config, name, None))
    if any(not 0 <= token < vocabulary for token in found):
        raise ModelError(f"`generation_config.{name}` must be tokens below {vocabulary}, but is {found}.")
    return found
