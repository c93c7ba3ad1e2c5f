"""Matrix product with a bias and an activation."""

from .op import matmul as matmul
from .op import supports as supports
