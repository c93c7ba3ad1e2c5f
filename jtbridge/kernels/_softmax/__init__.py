"""Softmax and its logarithm."""

from .op import log_softmax as log_softmax
from .op import softmax as softmax
from .op import unsupported_reason as unsupported_reason
