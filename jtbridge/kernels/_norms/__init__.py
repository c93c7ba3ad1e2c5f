"""Layer normalization and root mean square normalization."""

from .op import layer_norm as layer_norm
from .op import rms_norm as rms_norm
from .op import unsupported_reason as unsupported_reason
