"""Gated activations: one half of a layer's width, activated, times the other."""

from .op import geglu as geglu
from .op import swiglu as swiglu
from .op import unsupported_reason as unsupported_reason
