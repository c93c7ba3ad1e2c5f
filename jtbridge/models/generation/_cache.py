"""Caches of transformers at a fixed size, so that a cache can be the carry of a loop.

A model makes its cache itself when it reads the prompt. That cache grows by concatenation. `fixed_size` puts its keys
and values into buffers that have room for all tokens to come. This module needs transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import cache_utils

from jtbridge.core.pytree import register_class
from jtbridge.errors import ModelError

STATELESS_LAYER = getattr(cache_utils, "DummyLayer", None)  # transformers 5.17 does not have it yet
_LINEAR = cache_utils.LinearAttentionLayer
_HYBRID: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", _LINEAR)
_HYBRID_SLIDING: Any = getattr(cache_utils, "LinearAttentionAndSlidingWindowAttentionLayer", _LINEAR)


class _FixedLayer(cache_utils.CacheLayerMixin):
    """Keys and values of one layer, in buffers of a fixed size.

    Args:
        keys, values: of shape ``(batch, heads, size, features)``.
        length: the number of tokens so far, a tensor without axes.
        total: the number of tokens that there will be at most.
    """

    keys: Any
    values: Any
    is_compileable = True  # transformers then makes a mask for each token: not all of the buffer is filled

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: torch.Tensor, total: int):
        cache_utils.CacheLayerMixin.__init__(self)  # not `super()`: that may be a layer of transformers
        self.keys, self.values, self.length, self.total = keys, values, length, total
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise NotImplementedError("it is initialized")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys and values of one token; return all of them."""
        if key_states.shape[2] != 1:
            raise ModelError(f"A step of generation is one token, but the model passes {key_states.shape[2]}.")
        slot = self._slot().reshape(1)
        self.keys = self.keys.index_copy(2, slot, key_states)
        self.values = self.values.index_copy(2, slot, value_states)
        self.length = self.length + 1
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        return self.length

    def get_max_length(self) -> int:
        return self.total

    def _slot(self) -> torch.Tensor:
        """Return where the buffer has room for the next token."""
        return self.length


class FullLayer(_FixedLayer):
    """A layer that attends to all tokens: the token at position p is in slot p."""

    is_sliding = False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0


class RingLayer(_FixedLayer):
    """A layer that attends to a window of tokens: the token at position p is in slot ``p % size``."""

    is_sliding = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        return self.keys.shape[2], SlotPositions(self.length, self.total)

    def _slot(self) -> torch.Tensor:
        return self.length % self.keys.shape[2]


class SlotPositions:
    """The positions of the tokens in a ring buffer, in the form of an offset of the slots.

    transformers computes the positions of the keys as ``torch.arange(size) + offset``. The sum with this object is the
    position of the token in each slot. An unfilled slot gets the last possible position. As long as there is such a
    slot, this position is after that of every query, so a causal mask excludes the slot.

    Args:
        length: the position of the query.
        total: the number of tokens that there will be at most.
    """

    def __init__(self, length: torch.Tensor, total: int):
        self._length, self._total = length, total

    def __radd__(self, slots: Any) -> Any:
        if isinstance(slots, int):  # the length that the padding mask must have
            return self._total
        positions = self._length - (self._length - slots) % slots.shape[0]
        return torch.where(positions < 0, self._total - 1, positions)


class _HybridLayer:
    """A layer with keys and values in buffers, and with the states of linear attention as they are."""

    def take_states(self, layer: Any) -> None:
        """Take the states of linear attention from the layer that a model made."""
        vars(self).update({name: vars(layer)[name] for name in vars(_LINEAR())})


class HybridFullLayer(_HybridLayer, FullLayer, _HYBRID):
    """A layer with full and with linear attention."""


class HybridRingLayer(_HybridLayer, RingLayer, _HYBRID_SLIDING):
    """A layer that attends to a window of tokens, and has linear attention."""


for _layer in (FullLayer, RingLayer, HybridFullLayer, HybridRingLayer):
    register_class(_layer)


def fixed_size(cache: Any, length: int, total: int) -> Any:
    """Return a cache that a model made for a prompt, with room for further tokens.

    Args:
        cache: the cache after the prompt.
        length: the number of tokens in the prompt.
        total: the number of tokens that there will be at most.

    Raises:
        ModelError: the class of the cache, or of one of its layers, cannot be given a fixed size.
    """
    if isinstance(cache, cache_utils.EncoderDecoderCache):  # the keys of the encoder stay as they are
        cache.self_attention_cache = fixed_size(cache.self_attention_cache, length, total)
        return cache
    if not isinstance(cache, cache_utils.Cache):
        raise ModelError(
            f"`jtbridge.generate` needs a model whose cache is a `transformers.Cache`, but this one returned a "
            f"{type(cache).__name__}. Write the loop with `jtbridge.module`."
        )
    return cache_utils.Cache(layers=[_fixed_layer(layer, length, total) for layer in cache.layers])


def has_hybrid_layers(cache: Any) -> bool:
    """Return whether any layer has keys and values, and recurrent states too."""
    return any(isinstance(layer, _HybridLayer) for layer in getattr(cache, "layers", ()))


def has_buffers(cache: Any) -> bool:
    """Return whether any layer keeps keys and values in a buffer. Layers with only recurrent states do not."""
    if isinstance(cache, cache_utils.EncoderDecoderCache):
        return has_buffers(cache.self_attention_cache)
    return any(isinstance(layer, _FixedLayer) for layer in cache.layers)


def _fixed_layer(layer: Any, length: int, total: int) -> Any:
    kind = type(layer)
    if kind in (_LINEAR, STATELESS_LAYER):
        return layer  # its size does not depend on the number of tokens
    if kind is cache_utils.DynamicLayer and not layer.is_initialized:
        return layer  # a layer that uses the keys of another layer
    stored = layer.get_seq_length() if issubclass(kind, cache_utils.DynamicLayer) else length
    if stored != length:
        raise ModelError(
            f"The model's cache has {stored} tokens for a prompt of {length}, because it adds tokens, such as those of "
            "an image. `jtbridge.generate` does not know their positions. Write the loop with `jtbridge.module`."
        )
    if kind in (cache_utils.DynamicLayer, _HYBRID):
        keys, values = (_padded_buffer(part, total) for part in (layer.keys, layer.values))
        made: type[_FixedLayer] = HybridFullLayer if kind is _HYBRID else FullLayer
    elif kind in (cache_utils.DynamicSlidingWindowLayer, _HYBRID_SLIDING):
        size = min(layer.sliding_window, total)
        keys, values = (_ring(part, length, size) for part in (layer.keys, layer.values))
        made = HybridRingLayer if kind is _HYBRID_SLIDING else RingLayer
    else:
        raise ModelError(
            f"`jtbridge.generate` does not know how to give a cache layer of class {kind.__name__} a fixed size. It "
            "knows full, sliding-window and chunked attention, and the states of linear attention."
        )
    fixed = made(keys, values, torch.tensor(length, device=layer.keys.device), total)
    if isinstance(fixed, _HybridLayer):
        fixed.take_states(layer)
    return fixed


def _padded_buffer(part: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(part, (0, 0, 0, size - part.shape[2]))


def _ring(part: torch.Tensor, length: int, size: int) -> torch.Tensor:
    """Return a ring buffer with the keys or values of the last tokens of a prompt."""
    count = min(part.shape[2], size)
    return _padded_buffer(part[:, :, part.shape[2] - count :], size).roll((length - count) % size, 2)
