"""The JAX primitives, one file each, closed under jvp, linearize, transpose and vmap."""

from . import _call, _linear, _part  # they register rules
from ._binding import torch_call
from ._devices import with_devices
from ._ordered import torch_ordered
