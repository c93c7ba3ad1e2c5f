"""The decorator, and the calls of wrapped functions: `eager` runs torch, `traced` binds a primitive in a JAX trace."""

from ._config import config as config
from ._wrap import wrap as wrap
