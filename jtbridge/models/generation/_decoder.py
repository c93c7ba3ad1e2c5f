"""A model of transformers as two functions: one reads the prompt, the other reads one more token."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jtbridge.errors import ModelError
from jtbridge.models._module import JaxModule

# How models name their cache, in arguments and in outputs: "cache" from transformers 5.24 on.
_CACHES = ("past_key_values", "cache_params", "cache")
# Arguments that set what a model returns. They take precedence over its configuration.
_OUTPUTS = {"use_cache": True, "return_dict": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """The state that a step passes to the next step.

    Attributes:
        cache: the model's cache.
        positions: the position of the next token in each sequence, of shape ``(batch,)``.
    """

    cache: Any
    positions: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompt:
    """The arrays that all steps share.

    Attributes:
        mask: which tokens count, of shape ``(batch, total)``: of the decoder, or of the encoder if there is one. An
            encoder may have no mask.
        encoded: the output of the encoder, if there is one: all its fields, because a decoder may read more than the
            hidden states, such as a mask.
    """

    mask: jax.Array | None
    encoded: Any


@dataclasses.dataclass(frozen=True)
class PrefilledState:
    """The state of a model after it has read a prompt.

    Attributes:
        ids: the tokens of the decoder, padded on the left, of shape ``(batch, length)``.
        mask: which of the tokens count, of the same shape.
        scores: the scores of the next token, of shape ``(batch, vocabulary)``.
        prompt: the arrays that all steps share.
        carry: the carry of the first step.
    """

    ids: jax.Array
    mask: jax.Array
    scores: jax.Array
    prompt: Prompt
    carry: Carry


class Decoder:
    """A model with its parameters and state.

    Args:
        net: the model.
        params, state: its tensors.
        total: the largest number of tokens of a sequence: the prompt and all new tokens.
    """

    def __init__(self, net: JaxModule, params: Any, state: Any, total: int):
        self._net, self._params, self._state, self._total = net, params, state, total

    def read(self, ids: jax.Array, mask: jax.Array, encoder: dict[str, Any], inputs: dict[str, Any]) -> PrefilledState:
        """Run the model on the prompt; return its state after the prompt.

        Args:
            ids: the tokens of the decoder, padded on the left, of shape ``(batch, length)``.
            mask: which of them count.
            encoder: the arguments of the encoder; empty if there is none.
            inputs: further arguments of the model, such as images.
        """
        logits, encoded, cache = self._run(_read_prompt, {**encoder, **inputs}, ids, mask, self._total)
        rest = jnp.ones((ids.shape[0], self._total - ids.shape[1]), mask.dtype)
        shared = encoder.get("attention_mask") if encoder else jnp.concatenate([mask, rest], 1)
        return PrefilledState(ids, mask, logits, Prompt(shared, encoded), Carry(cache, mask.sum(-1)))

    def step(self, token: jax.Array, prompt: Prompt, carry: Carry) -> tuple[jax.Array, Carry]:
        """Read one token of each sequence, of shape ``(batch,)``; return the scores of the next one and the carry."""
        logits, cache = self._run(
            _read_token, {}, token[:, None], prompt.mask, prompt.encoded, carry.cache, carry.positions[:, None]
        )
        return logits, Carry(cache, carry.positions + 1)

    def _run(self, function: Any, inputs: dict[str, Any], *args: Any) -> Any:
        out, changed = self._net.method(function)(self._params, self._state, *args, **inputs)
        if changed:
            raise ModelError(
                f"A step of `{self._net.__name__}` changes its state ({', '.join(changed)}), which `jtbridge.generate` "
                "does not carry from one token to the next. Write the loop with `jtbridge.module`."
            )
        return out


def _read_prompt(model: Any, ids: torch.Tensor, mask: torch.Tensor, total: int, **inputs: Any) -> Any:
    """Run a torch model on a prompt; return the last scores, the output of the encoder, and a cache of fixed size."""
    from ._cache import fixed_size, has_buffers, has_hybrid_layers  # they need transformers

    model = plain_model(model)
    if not model.config.is_encoder_decoder:
        inputs["attention_mask"] = mask
    else:
        inputs = _encoded(model, inputs)
    if takes(model, "position_ids"):
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    if takes(model, "logits_to_keep"):
        inputs["logits_to_keep"] = 1
    out = model(**model.prepare_inputs_for_generation(ids, is_first_iteration=True, **_OUTPUTS, **inputs))
    encoded = inputs["encoder_outputs"] if model.config.is_encoder_decoder else None
    cache = fixed_size(out[_cache_name(out)], ids.shape[1], total)
    # Hybrid layers are the only reason why transformers does not compile FalconH1 and Zamba2.
    grows = not getattr(model, "_can_compile_fullgraph", True) and not has_hybrid_layers(cache)
    if has_buffers(cache) and grows:
        raise ModelError(
            f"`{type(model).__name__}` needs a cache that grows (transformers says so by `_can_compile_fullgraph`), "
            "which `jtbridge.generate` does not have. Write the loop with `jtbridge.module`."
        )
    return out.logits[:, -1].float(), encoded, cache


def _read_token(
    model: Any,
    token: torch.Tensor,
    mask: torch.Tensor,
    encoded: Any,
    cache: Any,
    positions: torch.Tensor,
) -> Any:
    """Run a torch model on one token of each sequence."""
    model = plain_model(model)
    inputs: dict[str, Any] = {"attention_mask": mask}
    if encoded is not None:
        inputs["encoder_outputs"] = encoded
    if takes(model, "position_ids"):
        inputs["position_ids"] = positions
    name = next(name for name in _CACHES if takes(model, name))
    inputs |= {name: cache, "next_sequence_length": 1, "is_first_iteration": False, **_OUTPUTS}
    with _tables_of_fixed_size(model):
        out = model(**model.prepare_inputs_for_generation(token, **inputs))
    return out.logits[:, -1].float(), out[_cache_name(out)]


@contextlib.contextmanager
def _tables_of_fixed_size(model: Any) -> Iterator[None]:
    """Stop sinusoidal tables of positions, such as that of M2M100, from growing inside the block.

    A table grows if a position is beyond its end. `check_positions` has refused such positions, but in a loop the
    position has no value, so a trace would also follow the branch that grows the table.
    """
    tables = [part for part in model.modules() if hasattr(part, "make_weights")]
    for table in tables:
        table.make_weights = lambda *args: None
    try:
        yield
    finally:
        for table in tables:
            del table.make_weights


def _encoded(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Run the encoder; return the arguments of the decoder."""
    encoder = model.get_encoder()
    given = {name: value for name, value in inputs.items() if name != "attention_mask" or takes(encoder, name)}
    rest = {"attention_mask": inputs["attention_mask"]} if "attention_mask" in inputs else {}
    return {"encoder_outputs": encoder(**given, return_dict=True), **rest}


def plain_model(model: Any) -> Any:
    """Return the model of transformers inside a model with adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def takes(model: Any, name: str) -> bool:
    """Return whether a model's ``forward`` has an argument of this name."""
    return name in inspect.signature(model.forward).parameters


def own_generation(model: Any) -> str | None:
    """Return the name of a method of `GenerationMixin` for generation that a model overrides; None if there is none."""
    from transformers import GenerationMixin

    for name in _METHODS:
        if getattr(type(model), name, None) is not getattr(GenerationMixin, name, None):
            return name
    return None


_METHODS = (
    "generate",
    "_sample",
    "_beam_search",
    "_prepare_position_ids_for_generation",
    "_update_model_kwargs_for_generation",
    "_prepare_attention_mask_for_generation",
    "_prepare_cache_for_generation",
    "_prepare_decoder_input_ids_for_generation",
    "_get_logits_processor",
)


def _cache_name(out: Any) -> str:
    for name in _CACHES:
        if out.get(name) is not None:
            return name
    raise ModelError(f"The model returned no cache: `jtbridge.generate` looked for {' and '.join(_CACHES)}.")
