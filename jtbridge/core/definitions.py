"""The modules in which classes and functions are defined, and the slots of classes."""

from __future__ import annotations

import types
from collections.abc import Iterable


def module_of(defined: type | types.FunctionType) -> str:
    """Return the name of the module in which a class or a function is defined; "" if `__module__` is not a string.

    The `__module__` of a class may be a descriptor for its instances, as in the class of Cython's functions.
    """
    name = defined.__module__
    return name if isinstance(name, str) else ""


def slot_names(classes: Iterable[type]) -> list[str]:
    """Return the names in the `__slots__` of classes, such as the bases of a class, except special names."""
    names = []
    for cls in classes:
        slots = vars(cls).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                names.append(name)
            elif not name.endswith("__"):  # a private name, which Python mangles
                names.append(f"_{cls.__name__.lstrip('_')}{name}")
    return names
