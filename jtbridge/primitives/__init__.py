"""The JAX primitives, one file each, closed under jvp, linearize, transpose and vmap."""

from . import _call as _call  # these modules register rules
from . import _linear as _linear
from . import _part as _part
from ._binding import torch_call
from ._devices import with_devices
from ._ordered import torch_ordered

__all__ = ["torch_call", "torch_ordered", "with_devices"]
