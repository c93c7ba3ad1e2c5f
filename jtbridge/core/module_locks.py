"""Locks of modules: torch.func.functional_call exchanges a module's parameters in place while it runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .forward_mode import forward_mode_for
from .traits import FunctionTraits

_MODULE_LOCKS: weakref.WeakKeyDictionary[torch.nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def locks_for(traits: FunctionTraits) -> tuple[Any, ...]:
    """Return the locks of the modules that a function calls, in a fixed order, and of forward mode if it is used.

    XLA runs calls of several devices at once, and torch.func.functional_call exchanges a module's parameters in place
    while it runs. A function that calls no module takes no lock of a module.
    """
    modules = module_locks([module for ref in traits.effects.modules if (module := ref()) is not None])
    return (*modules, *forward_mode_for(traits.autograd.forward_mode))


def module_locks(modules: Sequence[torch.nn.Module]) -> tuple[Any, ...]:
    """Return the locks of the outermost modules: the modules that are not part of another one in `modules`."""
    children = {id(child) for module in modules for child in module.modules() if child is not module}
    roots = sorted((module for module in modules if id(module) not in children), key=id)
    return tuple(_MODULE_LOCKS.setdefault(module, threading.RLock()) for module in roots)
