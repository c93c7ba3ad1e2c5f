"""Gated activations, ``activation(gate) * up``, as in the feed-forward layers of transformers."""

from .op import geglu as geglu
from .op import swiglu as swiglu
from .op import unsupported_reason as unsupported_reason
