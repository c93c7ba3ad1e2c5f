"""Changes of the scores of the next token, as transformers makes them and in its order."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ._decoder import Start
from ._settings import GenerationSettings

_NEVER = -jnp.inf


def constrained(
    scores: jax.Array,
    number: jax.Array | int,
    seen: jax.Array | None,
    settings: GenerationSettings,
    controls: dict[str, jax.Array],
) -> jax.Array:
    """Return scores with penalties, and with forced and suppressed tokens.

    Args:
        scores: of shape ``(batch, vocabulary)``, float32.
        number: how many tokens were generated before.
        seen: which tokens each sequence has, of shape ``(batch, vocabulary)``; None without a penalty for them.
        settings: what is asked for.
        controls: the numbers that a program takes as arguments.
    """
    number = jnp.asarray(number)
    if seen is not None:
        penalty = controls["repetition_penalty"]
        scores = jnp.where(seen, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)
    if settings.min_new_tokens and settings.eos:
        scores = _without(scores, settings.eos, number < settings.min_new_tokens)
    if settings.forced_first is not None:
        scores = _only(scores, (settings.forced_first,), number == 0)
    if settings.forced_last:
        scores = _only(scores, settings.forced_last, number == settings.max_new_tokens - 1)
    if settings.suppressed:
        scores = _without(scores, settings.suppressed, True)
    if settings.suppressed_first:
        first = 0 if settings.forced_first is None else 1
        scores = _without(scores, settings.suppressed_first, number == first)
    return scores


def _tokens(scores: jax.Array, tokens: tuple[int, ...]) -> jax.Array:
    return jnp.zeros(scores.shape[-1], bool).at[jnp.array(tokens)].set(True)


def _without(scores: jax.Array, tokens: tuple[int, ...], when: jax.Array | bool) -> jax.Array:
    return jnp.where(_tokens(scores, tokens) & when, _NEVER, scores)


def _only(scores: jax.Array, tokens: tuple[int, ...], when: jax.Array) -> jax.Array:
    forced = jnp.where(_tokens(scores, tokens), 0.0, _NEVER)
    return jnp.where(when, forced, scores)


def warped(scores: jax.Array, controls: dict[str, jax.Array], top_k: int | None) -> jax.Array:
    """Return scores to sample from: with a temperature, and without the tokens that the settings exclude."""
    if "temperature" in controls:
        scores = scores / controls["temperature"]
    if top_k is not None:
        lowest = jax.lax.top_k(scores, min(top_k, scores.shape[-1]))[0][..., -1:]
        scores = jnp.where(scores < lowest, _NEVER, scores)
    if "top_p" in controls:
        order = jnp.argsort(scores, axis=-1)  # the most probable token is last, and always stays
        ordered = jnp.take_along_axis(scores, order, -1)
        is_tail = jnp.cumsum(jax.nn.softmax(ordered, -1), -1) <= 1 - controls["top_p"]
        is_tail = is_tail.at[..., -1].set(False)
        removed = jnp.put_along_axis(jnp.zeros_like(is_tail), order, is_tail, -1, inplace=False)
        scores = jnp.where(removed, _NEVER, scores)
    if "min_p" in controls:
        probabilities = jax.nn.softmax(scores, -1)
        is_rare = probabilities < controls["min_p"] * probabilities.max(-1, keepdims=True)
        scores = jnp.where(is_rare, _NEVER, scores)
    return scores


def tokens_seen(start: Start, controls: dict[str, jax.Array]) -> jax.Array | None:
    """Return which tokens are in each prompt, of shape ``(batch, vocabulary)``; None without a penalty for them.

    As in transformers, the padding before a prompt does not count, and a masked token in it does.
    """
    if "repetition_penalty" not in controls:
        return None
    rows = jnp.arange(start.ids.shape[0])[:, None]
    return jnp.zeros(start.scores.shape, bool).at[rows, start.ids].max(jnp.cumsum(start.mask, -1) > 0)


def ends(tokens: jax.Array, settings: GenerationSettings) -> jax.Array:
    """Return which tokens end a sequence."""
    return jnp.isin(tokens, jnp.array(settings.eos, tokens.dtype))
