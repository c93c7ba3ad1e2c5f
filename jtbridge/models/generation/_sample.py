"""The loop over tokens: greedy and sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jtbridge.core.extreme_positions import first_largest

from ._decoder import Decoder, PrefilledState
from ._scores import TokenHistory, constrained_scores, ends, warped
from ._settings import GenerationSettings


def sample(
    decoder: Decoder,
    start: PrefilledState,
    settings: GenerationSettings,
    controls: dict[str, Any],
    rng: jax.Array | None,
    emit: Callable[[jax.Array], jax.Array] | None,
) -> jax.Array:
    """Return the generated tokens, of shape ``(batch, max_new_tokens)``, with padding after the end of a sequence.

    Args:
        decoder: the model.
        start: the state of the model after the prompt.
        settings, controls: the settings of the generation.
        rng: a key; None for greedy tokens.
        emit: passes the tokens of a step to the user's function, and returns whether to stop.
    """
    batch = start.ids.shape[0]

    def chosen(
        number: Any, scores: jax.Array, past: TokenHistory, ended: jax.Array
    ) -> tuple[jax.Array, TokenHistory, jax.Array, jax.Array]:
        scores = constrained_scores(scores, number, past, settings, controls)
        if rng is None:
            token = first_largest(scores, 1, jnp.int32)
        else:
            key = jax.random.fold_in(rng, number)
            token = jax.random.categorical(key, warped(scores, controls, settings.top_k))
        token = jnp.where(ended, settings.pad, token).astype(start.ids.dtype)
        past = past.followed_by(token, number, settings)
        ended |= ends(token, settings)
        stopped = jnp.all(ended)
        if emit is not None:
            stopped |= emit(token)
        return token, past, ended, stopped

    def body(loop: Any) -> Any:
        number, token, past, ended, _, carry, tokens = loop
        scores, carry = decoder.step(token, start.prompt, carry)
        token, past, ended, stopped = chosen(number, scores, past, ended)
        return number + 1, token, past, ended, stopped, carry, tokens.at[:, number].set(token)

    past = TokenHistory.of_prompts(start, settings, controls)
    token, past, ended, stopped = chosen(0, start.scores, past, jnp.zeros(batch, bool))
    tokens = jnp.full((batch, settings.max_new_tokens), settings.pad, token.dtype).at[:, 0].set(token)
    return jax.lax.while_loop(
        lambda loop: (loop[0] < settings.max_new_tokens) & ~loop[4],
        body,
        (jnp.array(1, jnp.int32), token, past, ended, stopped, start.carry, tokens),
    )[-1]
