"""The private tables of `torch.nn.Module`. Its public methods copy them, or leave out None. Tried on torch 2.13."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

MODULE_TABLES = ("_parameters", "_buffers", "_modules")
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Lists that a recurrent module updates when one of its weights is assigned, such as by `torch.func.functional_call`.
RNN_WEIGHTS = frozenset({"_flat_weights", "_flat_weight_refs"})


def registered_parameters(module: torch.nn.Module) -> dict[str, Any]:
    """Return the parameters that are registered with a module itself, None included."""
    return vars(module)["_parameters"]


def registered_buffers(module: torch.nn.Module) -> dict[str, Any]:
    """Return the buffers that are registered with a module itself, None included."""
    return vars(module)["_buffers"]


def registered_modules(module: torch.nn.Module) -> dict[str, Any]:
    """Return the submodules that are registered with a module itself, None included."""
    return vars(module)["_modules"]


def non_persistent_buffers(module: torch.nn.Module) -> set[str]:
    """Return the names of the module's own buffers that are not part of its ``state_dict``."""
    return vars(module)["_non_persistent_buffers_set"]


def forward_pre_hooks(attributes: dict[str, Any]) -> list[Any]:
    """Return the forward pre-hooks of the module with these attributes; none while the module is built or copied."""
    return list((attributes.get("_forward_pre_hooks") or {}).values())


def computed_attribute(hook: Any) -> str:
    """Return the name of the attribute that a hook of `torch.nn.utils` computes, which `prune` stores privately."""
    return str(getattr(hook, "name", None) or getattr(hook, "_tensor_name", None))


def module_versions(state_dict: Any) -> Any | None:
    """Return the versions of the modules whose ``state_dict`` this is; None if it has none."""
    return getattr(state_dict, "_metadata", None)


class VersionedStateDict(dict):
    """A ``state_dict`` with the versions of its modules, which torch needs to load a state of an older version."""

    def __init__(self, entries: Mapping[str, Any], versions: Any):
        super().__init__(entries)
        self._metadata = versions
