"""Rotary position embedding."""

from .op import rope as rope
from .op import rope_qk as rope_qk
from .op import unsupported_reason as unsupported_reason
