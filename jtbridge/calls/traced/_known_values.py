"""Arrays of a call whose values are known while JAX traces, as constants of the torch function.

An array that a function under ``jax.jit`` closes over has a value in the trace, and is a constant of the program. A
function may then compute a size from it, or branch on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
import torch

from jtbridge.core.signature import ARRAY, Signature

NONE_KNOWN: Mapping[int, np.ndarray] = {}
_MAX_ELEMENTS = 64  # elements; arrays that decide about sizes and branches are small


def known_array_values(arrays: Sequence[Any]) -> dict[int, np.ndarray]:
    """Return the values of the small arrays of integers and booleans that are not tracers, by position."""
    return {position: np.asarray(x) for position, x in enumerate(arrays) if _has_known_values(x)}


def _has_known_values(x: Any) -> bool:
    return (
        not isinstance(x, jax.core.Tracer)
        and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
        and x.dtype.kind in "biu"
        and x.size <= _MAX_ELEMENTS
        and not x.is_deleted()
        and x.is_fully_addressable
    )


def with_values(signature: Signature, values: Mapping[int, np.ndarray], dtypes: Sequence[torch.dtype]) -> Signature:
    """Return the signature of a call in which some arrays are tensors with known values.

    Args:
        signature: the signature of the call.
        values: the values of arrays, by position among the arrays.
        dtypes: the torch dtype in which each array reaches the function.
    """
    leaves = [i for i, key in enumerate(signature.keys) if key is ARRAY]
    keys, statics = list(signature.keys), list(signature.statics)
    for position, value in values.items():
        keys[leaves[position]] = ("known", value.shape, dtypes[position], value.tobytes())
        statics[leaves[position]] = torch.from_numpy(value.copy()).to(dtypes[position])
    types = tuple(type_ for i, type_ in enumerate(signature.types) if i not in values)
    return dataclasses.replace(signature, keys=tuple(keys), statics=tuple(statics), types=types)
