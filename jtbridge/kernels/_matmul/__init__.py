"""Matrix product with a bias and an activation."""

from .op import matmul as matmul
from .op import unsupported_reason as unsupported_reason
