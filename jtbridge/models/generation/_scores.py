"""Changes of the scores of the next token, as transformers makes them and in its order."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ._decoder import PrefilledState
from ._settings import GenerationSettings

_NEVER = -jnp.inf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenHistory:
    """The earlier tokens, as far as penalties and limits of repetition need them.

    Attributes:
        seen: which tokens each sequence has, of shape ``(batch, vocabulary)``; None without a penalty for them.
        tokens: prompts and generated tokens, of shape ``(batch, length + max_new_tokens)``; None if
            repetition is not limited, or the limit is longer than the sequences.
    """

    seen: jax.Array | None
    tokens: jax.Array | None

    @classmethod
    def of_prompts(
        cls, start: PrefilledState, settings: GenerationSettings, controls: dict[str, jax.Array]
    ) -> TokenHistory:
        """Return the past of the first token.

        As in transformers, the padding before a prompt does not count as seen, but a masked token in the prompt does.
        """
        seen, tokens = None, None
        if "repetition_penalty" in controls:
            rows = jnp.arange(start.ids.shape[0])[:, None]
            seen = jnp.zeros(start.scores.shape, bool).at[rows, start.ids].max(jnp.cumsum(start.mask, -1) > 0)
        if 0 < settings.unrepeated < start.ids.shape[1] + settings.max_new_tokens:
            tokens = jnp.pad(start.ids, ((0, 0), (0, settings.max_new_tokens)))
        return cls(seen, tokens)

    def followed_by(self, token: jax.Array, number: jax.Array | int, settings: GenerationSettings) -> TokenHistory:
        """Return the past with one more token of each sequence: the generated token `number`."""
        rows = jnp.arange(token.shape[0])
        seen, tokens = self.seen, self.tokens
        if seen is not None:
            seen = seen.at[rows, token].set(True)
        if tokens is not None:
            tokens = tokens.at[:, tokens.shape[1] - settings.max_new_tokens + number].set(token)
        return TokenHistory(seen, tokens)


def constrained_scores(
    scores: jax.Array,
    number: jax.Array | int,
    past: TokenHistory,
    settings: GenerationSettings,
    controls: dict[str, jax.Array],
) -> jax.Array:
    """Return scores with penalties, and with forced and suppressed tokens.

    Args:
        scores: of shape ``(batch, vocabulary)``, float32.
        number: how many tokens were generated before.
        past: the earlier tokens.
        settings: the settings of the generation.
        controls: the numbers that a program takes as arguments.
    """
    number = jnp.asarray(number)
    if past.seen is not None:
        penalty = controls["repetition_penalty"]
        scores = jnp.where(past.seen, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)
    if past.tokens is not None:
        prompts = past.tokens.shape[1] - settings.max_new_tokens  # the length of the padded prompts
        first, end = prompts - controls["prompt_length"], prompts + number
        scores = jnp.where(_completing_tokens(scores, past.tokens, first, end, settings.unrepeated), _NEVER, scores)
    if settings.min_new_tokens and settings.eos:
        scores = _forbidden(scores, settings.eos, number < settings.min_new_tokens)
    if settings.forced_first is not None:
        scores = _forced(scores, (settings.forced_first,), number == 0)
    if settings.forced_last:
        scores = _forced(scores, settings.forced_last, number == settings.max_new_tokens - 1)
    if settings.suppressed:
        scores = _forbidden(scores, settings.suppressed, True)
    if settings.suppressed_first:
        first = 0 if settings.forced_first is None else 1
        scores = _forbidden(scores, settings.suppressed_first, number == first)
    return scores


def _completing_tokens(scores: jax.Array, tokens: jax.Array, first: jax.Array, end: jax.Array, count: int) -> jax.Array:
    """Return which next tokens would complete an n-gram of `count` tokens that a sequence already has.

    Args:
        scores: the scores of the next token, of shape ``(batch, vocabulary)``.
        tokens: the tokens of the sequences, of shape ``(batch, length)``. Those between `first` and `end` count.
        first, end: the positions of the first token and of the next token.
        count: the length of the n-grams.
    """
    starts = jnp.arange(tokens.shape[1] - count + 1)
    latest = jax.lax.dynamic_slice_in_dim(tokens, end - (count - 1), count - 1, 1)
    same = jnp.broadcast_to((starts >= first) & (starts + count <= end), (tokens.shape[0], starts.size))
    for i in range(count - 1):
        same &= tokens[:, i : i + starts.size] == latest[:, i : i + 1]
    rows = jnp.arange(tokens.shape[0])[:, None]
    return jnp.zeros(scores.shape, bool).at[rows, tokens[:, count - 1 :]].max(same)


def _token_mask(scores: jax.Array, tokens: tuple[int, ...]) -> jax.Array:
    return jnp.zeros(scores.shape[-1], bool).at[jnp.array(tokens)].set(True)


def _forbidden(scores: jax.Array, tokens: tuple[int, ...], when: jax.Array | bool) -> jax.Array:
    return jnp.where(_token_mask(scores, tokens) & when, _NEVER, scores)


def _forced(scores: jax.Array, tokens: tuple[int, ...], when: jax.Array) -> jax.Array:
    forced = jnp.where(_token_mask(scores, tokens), 0.0, _NEVER)
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


def ends(tokens: jax.Array, settings: GenerationSettings) -> jax.Array:
    """Return which tokens end a sequence."""
    return jnp.isin(tokens, jnp.array(settings.eos, tokens.dtype))
