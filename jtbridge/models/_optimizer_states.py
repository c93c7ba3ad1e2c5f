"""The arrays that an optimizer keeps for each parameter: their names and shardings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

Shape = tuple[int, ...]


def name_of(path: Sequence[Any]) -> str:
    """Return the name of a leaf: the last consecutive dict keys on its path, joined by dots.

    Earlier dict keys are names of groups, such as those of `optax.multi_transform`.
    """
    keys: list[str] = []
    for step in reversed(path):
        if isinstance(step, jax.tree_util.DictKey):
            keys.append(str(step.key))
        elif keys:
            break
    return ".".join(reversed(keys))


def spec_of_state(spec: PartitionSpec, parameter: Shape, shape: Shape) -> PartitionSpec:
    """Return how to split an array that an optimizer keeps for a parameter: axes that both have are split alike.

    Args:
        spec: how the parameter is split.
        parameter: the shape of the parameter.
        shape: the shape of the array. It may have further leading axes, as the history of L-BFGS has, or lack axes, as
            the means of Adafactor do. An array of any other shape is not split.
    """
    if shape == parameter:
        return spec
    entries = (*spec, *[None] * (len(parameter) - len(spec)))
    more = len(shape) - len(parameter)
    found: set[tuple[Any, ...]] = set()
    if more > 0 and shape[more:] == parameter:
        found = {(*[None] * more, *entries)}
    elif more < 0:
        for axes in itertools.combinations(range(len(parameter)), len(shape)):
            if tuple(parameter[axis] for axis in axes) == shape:
                found.add(tuple(entries[axis] for axis in axes))
    (chosen,) = found if len(found) == 1 else ((),)  # several: it is unknown which axes are left
    return PartitionSpec(*chosen) if any(chosen) else PartitionSpec()
