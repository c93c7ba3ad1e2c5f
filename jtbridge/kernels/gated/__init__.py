"""Gated activations: the activation of one half of a layer's width, times the other half."""

from .op import geglu as geglu
from .op import swiglu as swiglu
from .op import unsupported_reason as unsupported_reason
