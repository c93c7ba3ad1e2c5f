"""Attention."""

from .op import attention as attention
from .op import chosen as chosen
from .op import unsupported_reason as unsupported_reason
