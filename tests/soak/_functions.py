"""All functions of the load test."""

from __future__ import annotations

import dataclasses

from . import _dropped, _eager, _jitted, _raising, _reverse
from ._function import Function

_SHARE_THAT_RAISES = 0.01


def functions() -> list[Function]:
    returning = [function for module in (_eager, _jitted, _reverse, _dropped) for function in module.functions()]
    raising = _raising.functions()
    factor = _SHARE_THAT_RAISES * _weight(returning) / ((1 - 2 * _SHARE_THAT_RAISES) * _weight(raising))
    return [*returning, *(dataclasses.replace(function, weight=function.weight * factor) for function in raising)]


def _weight(functions: list[Function]) -> float:
    return sum(function.weight for function in functions)
