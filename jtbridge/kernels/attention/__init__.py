"""Attention."""

from .op import attention as attention
from .op import supports as supports
