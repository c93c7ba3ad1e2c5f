"""Safetensors files with torch's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from jtbridge.errors import ModelError


def write_file(path: str | os.PathLike[str], state_dict: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write a ``state_dict``. A tied tensor is written once; the metadata maps its other names to that one."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    known: dict[int, str] = {}
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(
                f"`{name}` is a {type(value).__name__}, and a safetensors file has tensors alone. Save it with "
                "`torch.save(net.state_dict(params, state), path)`."
            )
        place = value.untyped_storage().data_ptr() if value.numel() else -len(known) - 1
        first = known.setdefault(place, name)
        if first == name:
            tensors[name] = value.contiguous()
        else:
            ties[name] = first
    save_file(tensors, os.fspath(path), metadata={"format": "pt", **ties, **metadata})


def read_file(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Read a file. Names that its metadata maps to a tensor, as ``safetensors.torch.save_model`` writes, are added."""
    from safetensors import safe_open

    with safe_open(os.fspath(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no dict)
        for name, first in (file.metadata() or {}).items():
            if first in tensors and name not in tensors:
                tensors[name] = tensors[first]
    return tensors
