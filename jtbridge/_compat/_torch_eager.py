"""What eager calls need of torch: autograd's engine without its wrappers, and the memory behind a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch._C._functorch as functorch_bindings

# Tried on torch 2.13. Storages have weak references, and no other class for them; this one has no documentation.
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef


def run_backward(
    outputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    create_graph: bool,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` with ``retain_graph=True, allow_unused=True``; None for an input that is not used.

    Tried on torch 2.13. The public function takes twice the time for a small graph, and imports sympy (0.3 s) the
    first time that it is given cotangents.
    """
    return torch.autograd.graph._engine_run_backward(
        tuple(outputs), tuple(cotangents), True, create_graph, tuple(inputs), allow_unreachable=True,
        accumulate_grad=False,
    )  # fmt: skip


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether anybody else refers to the memory of a tensor: another tensor, a graph of autograd, a storage.

    Tried on torch 2.13. Python counts references to tensors, not those that C++ holds to their memory.
    """
    storage = tensor.untyped_storage()
    # `tensor` is one user, `storage` another.
    return torch._C._storage_Use_Count(storage._cdata) > 2  # type: ignore[attr-defined]


def replace_memory(storage: torch.UntypedStorage) -> None:
    """Give a storage, and so every tensor over it, memory of its own with the same contents.

    Tried on torch 2.13 with `_swap_data_ptr_`. The public `share_memory_`, taken where a torch does not have that, does
    the same by way of shared memory, of which a container may have little.
    """
    swap = getattr(storage, "_swap_data_ptr_", None)
    if swap is None:
        storage.share_memory_()
    else:
        swap(storage.clone())


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with memory behind a tensor that `torch.func` has wrapped. Tried on torch 2.13; no public query."""
    while functorch_bindings.is_functorch_wrapped_tensor(tensor):
        tensor = functorch_bindings.get_unwrapped(tensor)
    return tensor


def node_names(tensors: Sequence[torch.Tensor]) -> set[str]:
    """The names of the nodes in the graph of autograd behind some tensors."""
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        for following, _ in pending.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return {node.name() for node in seen}


def has_error_node(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a backward marked `once_differentiable` has run in the graph behind some tensors.

    Tried on torch 2.13. It leaves a node that raises when it is differentiated, but torch gives zeros in silence if the
    derivative is asked for with ``allow_unused=True``.
    """
    return "torch::autograd::Error" in node_names(tensors)
