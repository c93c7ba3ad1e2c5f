"""Closed-over tensors as further inputs of a graph, so that they are arrays in the JAX program, not literals."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from jtbridge._compat import FakeTensor, is_zero
from jtbridge.core.dtypes import canonical_dtype, numpy_dtype
from jtbridge.core.functions import TracedFunction
from jtbridge.core.overlap import whole_storage

_MAX_INLINE_ELEMENTS = 256  # elements: a constant of up to this size is written into the program


def large_constants(module: fx.GraphModule) -> tuple[torch.Tensor, ...]:
    """Return the closed-over tensors of a graph that should become inputs, each once."""
    found: dict[Any, torch.Tensor] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target))
        if (
            isinstance(value, torch.Tensor)
            and not is_zero(value)
            and value.numel() > _MAX_INLINE_ELEMENTS
            and _crosses(value)
        ):
            found.setdefault(_tensor_identity(value), value)
    return tuple(found.values())


def lift_constants(module: fx.GraphModule, traced: TracedFunction) -> None:
    """Replace the constants of a graph by the inputs of `traced` that stand for them.

    The first inputs of the graph must be those of `traced`, its constants included (see :func:`with_places_for`).
    """
    inputs = module.graph.find_nodes(op="placeholder")
    first = traced.first_constant
    places = inputs[first : first + len(traced.constants)]
    by_identity = {_tensor_identity(tensor): place for tensor, place in zip(traced.constants, places, strict=True)}
    for node, value in _constants(module):
        place = by_identity.get(_tensor_identity(value))
        if place is not None:
            node.replace_all_uses_with(place)
            module.graph.erase_node(node)


def copy_literals(module: fx.GraphModule) -> None:
    """Replace the constants of a graph that become literals by copies.

    Otherwise user code could write to them before the graph is translated.
    """
    copied = _copied_in_place if any("as_strided" in str(node.target) for node in module.graph.nodes) else torch.clone
    for node, value in _constants(module):
        if value.numel() <= _MAX_INLINE_ELEMENTS or not _crosses(value):
            delattr(module, str(node.target))
            setattr(module, str(node.target), copied(value.detach()))


def _copied_in_place(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its whole storage and its offset: `as_strided` counts from the start of the storage."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return tensor.clone()
    place = tensor.shape, tensor.stride(), tensor.storage_offset()
    return whole_storage(tensor).clone().as_strided(*place)


def _constants(module: fx.GraphModule) -> list[tuple[fx.Node, torch.Tensor]]:
    """Return the constants of a graph that have values other than zeros, each with its node."""
    found = [(node, getattr(module, str(node.target))) for node in module.graph.find_nodes(op="get_attr")]
    tensors = [(node, x) for node, x in found if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)]
    return [(node, tensor) for node, tensor in tensors if not is_zero(tensor)]


def with_places_for(module: fx.GraphModule, first: int, constants: tuple[torch.Tensor, ...]) -> None:
    """Add an input for each constant to a graph, from position `first` on."""
    inputs = module.graph.find_nodes(op="placeholder")
    following = inputs[first] if first < len(inputs) else next(n for n in module.graph.nodes if n.op != "placeholder")
    with module.graph.inserting_before(following):
        for i, tensor in enumerate(constants):
            module.graph.placeholder(f"constant_{i}").meta["val"] = tensor.detach()


def _crosses(tensor: torch.Tensor) -> bool:
    """Return whether JAX can hold a tensor in its dtype. While x64 is off, JAX converts 64-bit dtypes to 32 bits."""
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        return False
    dtype = numpy_dtype(tensor.dtype, "a constant")
    return canonical_dtype(dtype) == dtype


def _tensor_identity(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
