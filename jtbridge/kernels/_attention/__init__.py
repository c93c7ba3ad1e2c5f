"""Attention."""

from .op import attention as attention
from .op import chosen_attention as chosen_attention
from .op import unsupported_reason as unsupported_reason
