"""The loop over tokens: beam search, with the scores and stopping rules of transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ._decoder import Decoder, PrefilledState
from ._scores import TokenHistory, constrained_scores, ends
from ._settings import GenerationSettings

_WORST = -1.0e9


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Beams:
    """Sequences of each batch element with their scores, the best first.

    Attributes:
        tokens: the generated tokens, of shape ``(batch, beams, max_new_tokens)``.
        scores: of shape ``(batch, beams)``.
        ended: whether each one ended, of the same shape.
    """

    tokens: jax.Array
    scores: jax.Array
    ended: jax.Array

    def best(self, count: int) -> tuple[_Beams, jax.Array]:
        """Return the `count` best sequences, and their positions among these sequences."""
        places = jax.lax.top_k(self.scores, count)[1]
        return jax.tree.map(lambda part: _gathered(part, places), self), places

    def joined(self, other: _Beams) -> _Beams:
        return jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), self, other)


def search(
    decoder: Decoder, start: PrefilledState, settings: GenerationSettings, controls: dict[str, Any]
) -> jax.Array:
    """Return the tokens of the best sequence of each prompt, of shape ``(batch, max_new_tokens)``.

    Args:
        decoder: the model.
        start: the state of the model after the prompt.
        settings, controls: the settings of the generation.
    """
    batch, vocabulary = start.scores.shape
    beams = settings.num_beams
    kept = min(max(2, 1 + len(settings.eos)), vocabulary) * beams
    is_top = jnp.arange(kept) < beams
    length = settings.max_new_tokens

    def repeated(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.repeat(x, beams, 0) if x.ndim and x.shape[0] == batch else x, tree)

    def extended(number: Any, scores: jax.Array, running: _Beams, past: TokenHistory) -> tuple[_Beams, jax.Array]:
        """Return the best continuations of the running sequences, and the sequence that each one continues."""
        scores = constrained_scores(jax.nn.log_softmax(scores, -1), number, past, settings, controls)
        scores = scores.reshape(batch, beams, vocabulary) + running.scores[..., None]
        best, places = jax.lax.top_k(scores.reshape(batch, -1), kept)
        parents, token = places // vocabulary, (places % vocabulary).astype(start.ids.dtype)
        tokens = _gathered(running.tokens, parents).at[:, :, number].set(token)
        return _Beams(tokens, best, ends(token, settings) | (number == length - 1)), parents

    def after(
        number: Any, scores: jax.Array, running: _Beams, done: _Beams, open_: jax.Array, past: TokenHistory
    ) -> Any:
        """Choose one more token of each sequence.

        Args:
            number: the position of the token among the generated tokens.
            scores: the scores of the token, of shape ``(batch * beams, vocabulary)``.
            running, done: the sequences that go on, and the best ones that ended.
            open_: whether each batch element may still get a better sequence, of shape ``(batch, 1)``.
            past: the earlier tokens of each sequence.
        """
        found, parents = extended(number, scores, running, past)
        running, places = dataclasses.replace(found, scores=_worsened(found.scores, found.ended)).best(beams)
        just_ended = found.ended & is_top
        final = found.scores / _length_divisor(number + 1, controls)
        if settings.early_stopping is True:
            final = _worsened(final, done.ended.all(-1, keepdims=True))
        final = _worsened(_worsened(final, ~open_), ~just_ended)
        done, _ = done.joined(_Beams(found.tokens, final, just_ended)).best(beams)
        open_ &= _may_improve(number + 1, running, done, settings, controls)
        goes_on = jnp.any(open_) & ~jnp.all(found.ended)
        if settings.early_stopping is True:
            goes_on &= ~jnp.all(done.ended)
        parents = _gathered(parents, places)
        rows = (parents + jnp.arange(batch)[:, None] * beams).reshape(-1)
        token = running.tokens[:, :, number].reshape(-1)
        past = jax.tree.map(lambda x: x[rows], past).followed_by(token, number, settings)
        return token, rows, running, done, open_, past, goes_on

    def body(loop: Any) -> Any:
        number, token, rows, running, done, open_, past, _, carry = loop
        reordered = jax.tree.map(lambda x: x[rows] if x.ndim and x.shape[0] == batch * beams else x, carry)
        scores, carry = decoder.step(token, shared, reordered)
        return number + 1, *after(number, scores, running, done, open_, past), carry

    shared, carry = repeated((start.prompt, start.carry))
    tokens = jnp.full((batch, beams, length), settings.pad, start.ids.dtype)
    nothing = jnp.zeros((batch, beams), bool)
    first_scores = jnp.zeros((batch, beams)).at[:, 1:].set(_WORST)  # the first tokens all continue the first sequence
    running, done = _Beams(tokens, first_scores, nothing), _Beams(tokens, jnp.full((batch, beams), _WORST), nothing)
    past = repeated(TokenHistory.of_prompts(start, settings, controls))
    first = after(0, repeated(start.scores), running, done, jnp.ones((batch, 1), bool), past)
    loop = (jnp.array(1, jnp.int32), *first, carry)
    loop = jax.lax.while_loop(lambda loop: (loop[0] < length) & loop[7], body, loop)
    return loop[4].tokens[:, 0]


def _may_improve(
    length: Any, running: _Beams, done: _Beams, settings: GenerationSettings, controls: dict[str, Any]
) -> jax.Array:
    """Return whether a running sequence could become better than the worst one that ended."""
    if settings.early_stopping == "never":
        length = jnp.where(controls["length_penalty"] > 0, settings.max_new_tokens, length)
    best = running.scores[:, :1] / _length_divisor(length, controls)
    worst = jnp.where(done.ended, done.scores.min(1, keepdims=True), _WORST)
    return jnp.any(best > worst, -1, keepdims=True)


def _gathered(part: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.take_along_axis(part, places.reshape(places.shape + (1,) * (part.ndim - 2)), 1)


def _worsened(scores: jax.Array, when: jax.Array) -> jax.Array:
    return jnp.where(when, scores + _WORST, scores)


def _length_divisor(length: Any, controls: dict[str, Any]) -> jax.Array:
    """Return the divisor of the scores of sequences of this length."""
    return jnp.asarray(length, jnp.float32) ** controls["length_penalty"]
