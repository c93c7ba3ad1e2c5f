"""The prompt of a generation: its checks, its mask, and its padding to a length that many prompts share."""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch

from jtbridge.errors import ArgumentError

from ._decoder import takes
from ._settings import GenerationSettings

_MIN_BUCKET = 16


def integers(ids: Any) -> jax.Array:
    """Return the tokens of the prompts as an array of signed integers. Raise an error for another dtype or shape."""
    ids = jnp.asarray(ids)
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer) or 0 in ids.shape:
        raise ArgumentError(
            "The prompts must be integers of shape (batch, length), with at least one token, but they have shape "
            f"{ids.shape} and dtype {ids.dtype}."
        )
    return ids.astype(jnp.int64 if ids.dtype.itemsize == 8 else jnp.int32)  # torch does not take unsigned tokens


def mask_of(
    model: Any, inputs: jax.Array, mask: Any, pad: int | None, settings: GenerationSettings
) -> jax.Array | None:
    """Return which tokens of a prompt count; None for a model that takes no mask.

    Args:
        model: the model.
        inputs: its input.
        mask: the mask that was given, if any.
        pad: the padding token, if one was given.
        settings: the settings of the generation.
    """
    if mask is None and (model.main_input_name != "input_ids" or not takes(model, "attention_mask")):
        return None
    if mask is None:
        pad = model.generation_config.pad_token_id if pad is None else pad
        if pad is None or pad in settings.eos:
            return jnp.ones(inputs.shape, jnp.int32)
        return (inputs != int(pad)).astype(jnp.int32)
    mask = jnp.asarray(mask)
    if model.main_input_name == "input_ids" and mask.shape != inputs.shape:
        raise ArgumentError(f"`attention_mask` must have the shape of the prompt, {inputs.shape}, not {mask.shape}.")
    if not isinstance(mask, jax.core.Tracer) and not np.isin(np.asarray(mask), (0, 1)).all():
        raise ArgumentError("`attention_mask` must have 1 for each token that counts, and 0 for the others.")
    return mask.astype(jnp.int32)


def check_tokens(model: Any, inputs: jax.Array, mask: jax.Array | None, settings: GenerationSettings) -> None:
    """Raise an error for tokens that the model does not have, or a prompt that is padded on the wrong side."""
    is_traced = isinstance(inputs, jax.core.Tracer) or isinstance(mask, jax.core.Tracer)
    if is_traced or model.main_input_name != "input_ids":
        return
    known = model.get_input_embeddings().weight.shape[0]
    ids = np.asarray(inputs)
    if ids.min() < 0 or ids.max() >= known:
        raise ArgumentError(
            f"The model has the tokens 0 to {known - 1}, but the prompt has {ids.min()} to {ids.max()}."
        )
    if settings.pad < 0 or settings.pad >= known:
        raise ArgumentError(
            f"The model has the tokens 0 to {known - 1}, but the padding token is {settings.pad}. Pass `pad_token_id=`."
        )
    if model.config.is_encoder_decoder or mask is None:
        return
    counted = np.asarray(mask)
    if not counted[:, -1].all():
        raise ArgumentError(
            "The prompts must be padded on the left: the last token of each one must count. With a tokenizer: "
            '`tokenizer.padding_side = "left"`.'
        )


def check_positions(model: Any, inputs: jax.Array, settings: GenerationSettings) -> None:
    """Raise an error if there are more tokens than a model with a table of positions has positions."""
    config = model.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None)
    needed = settings.max_new_tokens
    if not model.config.is_encoder_decoder:
        needed += inputs.shape[1] - 1
    elif model.main_input_name == "input_ids":
        needed = max(needed, inputs.shape[1])
    if most is not None and needed > most and _has_table(model, most):
        raise ArgumentError(
            f"The model has {most} positions, but the prompt and `max_new_tokens={settings.max_new_tokens}` need "
            f"{needed}. Pass a shorter prompt, or a smaller `max_new_tokens`."
        )


def _has_table(model: Any, positions: int) -> bool:
    """Return whether a model looks positions up in a table, as a parameter or a buffer."""
    tokens = model.get_input_embeddings()
    for part in model.modules():
        rows = positions + getattr(part, "offset", 0)
        if isinstance(part, torch.nn.Embedding) and part is not tokens and part.num_embeddings == rows:
            return True
        if any(b.ndim == 2 and b.shape[0] == rows for b in part.buffers(recurse=False)):
            return True
    return False


def in_bucket(model: Any, inputs: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Return a prompt and its mask, padded to the next power of two if padding does not change the result."""
    if mask is None or model.main_input_name != "input_ids":
        return inputs, mask
    length = inputs.shape[1]
    more = max(_MIN_BUCKET, 1 << (length - 1).bit_length()) - length
    if model.config.is_encoder_decoder:
        most = getattr(model.config, "max_position_embeddings", None)
        if most is not None and length + more > most:
            return inputs, mask
        sides = ((0, 0), (0, more))
    elif takes(model, "position_ids") and _only_attends(model):
        sides = ((0, 0), (more, 0))
    else:
        return inputs, mask
    return jnp.pad(inputs, sides), jnp.pad(mask, sides)  # 0 is a token of every model: the mask excludes it


def _only_attends(model: Any) -> bool:
    """Return whether a model's cache has only keys and values, so that a mask excludes tokens completely."""
    from transformers import cache_utils

    from ._cache import STATELESS_LAYER

    layers = cache_utils.DynamicCache(config=model.config).layers
    known = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer, STATELESS_LAYER)
    return all(type(layer) in known for layer in layers)
