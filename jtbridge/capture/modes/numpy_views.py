"""NumPy arrays of closed-over tensors, while a function is traced."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.overrides import TorchFunctionMode

from jtbridge._compat import has_plain_memory, outside_modes
from jtbridge.core.writes import AS_NUMPY


class NumpyViews(TorchFunctionMode):
    """Returns the memory of a closed-over tensor where code converts the tensor to a NumPy array.

    In fake mode, torch would convert the tensor to a fake one and return an array over memory that nobody owns. The
    array is read-only. Its values are read while the function is traced, like those of a closed-over array.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in AS_NUMPY or not has_plain_memory(args[0]):
            return func(*args, **kwargs)
        with outside_modes():
            array = func(*args, **kwargs)
        if isinstance(array, np.ndarray) and array.base is not None:
            array.flags.writeable = False
        return array
