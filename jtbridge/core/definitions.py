"""Where classes and functions are defined."""

from __future__ import annotations

import types


def module_of(defined: type | types.FunctionType) -> str:
    """Return the name of the module in which a class or a function is defined, or "" if it does not tell.

    `__module__` of a class may be a descriptor, which is for the instances: the metaclass of functions that Cython
    compiled has one.
    """
    name = defined.__module__
    return name if isinstance(name, str) else ""
