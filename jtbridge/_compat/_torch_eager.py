"""Private APIs of torch for eager calls: autograd's engine without its wrappers, and the memory of a tensor."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Tried on torch 2.13. The only class for weak references to storages; it is not documented.
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef

from ._torch import graph_nodes, innermost
from ._torch_modes import outside_modes


def run_backward(
    outputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    create_graph: bool,
    retain_graph: bool = True,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of `torch.autograd.grad` with ``allow_unused=True``: None for an input that is not used.

    Tried on torch 2.13. The public function takes twice the time for a small graph, and imports sympy (0.3 s) in its
    first call with cotangents. Torch function modes are not active in a backward that the public function runs.
    """
    return torch.autograd.graph._engine_run_backward(
        tuple(outputs), tuple(cotangents), retain_graph, create_graph, tuple(inputs), allow_unreachable=True,
        accumulate_grad=False,
    )  # fmt: skip


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether another tensor, an autograd graph or a storage refers to the memory of a tensor.

    Tried on torch 2.13. Python counts references to the tensor, not the references of C++ to its memory.
    """
    return any(map(operator.gt, _users(tensor), _users_of_one_tensor()))


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, without calling torch-function modes. Tried on torch 2.13."""
    with torch._C.DisableTorchFunction():
        return tensor.data_ptr()


def _users(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the number of C++ and of Python references to a tensor's storage."""
    with torch._C.DisableTorchFunction():  # a mode would hold references to the storage, which are counted below
        storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)  # type: ignore[attr-defined]


@functools.cache
def _users_of_one_tensor() -> tuple[int, int]:
    return _users(innermost(torch.empty(1)))  # the first call may be inside `torch.func`


def storage_of(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the storage that a weak reference refers to; None if it was freed. Tried on torch 2.13."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def can_replace_memory(device: str) -> bool:
    """Return whether :func:`replace_memory` can replace memory of a kind of device, such as "cuda".

    Tried on torch 2.11, where `share_memory_` leaves the memory of a GPU as it is, and 2.13.
    """
    return device == "cpu" or hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def replace_memory(storage: torch.UntypedStorage) -> None:
    """Replace the memory of a storage, and so of every tensor over it, by a copy.

    Tried on torch 2.13 with `_swap_data_ptr_`. Versions of torch without that method use the public `share_memory_`,
    which moves the storage to shared memory, of which a container may have little.
    """
    swap = getattr(storage, "_swap_data_ptr_", None)
    with outside_modes(), torch._C.DisableTorchFunction():  # `clone` runs operators, which modes would change
        if swap is None:
            storage.share_memory_()
            return
        copy = storage.clone()
        if storage.device.type == "cuda":  # another library may reuse the memory as soon as the storage drops it
            torch.cuda.current_stream(storage.device).synchronize()
        swap(copy)


def node_names(tensors: Sequence[torch.Tensor]) -> set[str]:
    """Return the names of the nodes in the autograd graph of some tensors."""
    return {node.name() for node in graph_nodes(tensors)}


def has_error_node(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a backward marked `once_differentiable` has run in the autograd graph of some tensors.

    Tried on torch 2.13. Such a backward leaves a node that raises when it is differentiated. With ``allow_unused=True``
    torch silently returns zeros instead.
    """
    return "torch::autograd::Error" in node_names(tensors)


def is_graph_leaf(tensor: torch.Tensor) -> bool:
    """Return ``tensor.is_leaf``, past the modes that answer for it. Tried on torch 2.11 and 2.13."""
    with torch._C.DisableTorchFunction():
        return tensor.is_leaf


def requiring_gradient(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that require a gradient, past the modes that record the question."""
    with torch._C.DisableTorchFunction():
        return [tensor for tensor in tensors if tensor.requires_grad]


def add_gradient_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Return the handle of ``tensor.register_hook(hook)``, past the modes that record hooks. Tried on torch 2.13."""
    with torch._C.DisableTorchFunction():
        return tensor.register_hook(hook)
