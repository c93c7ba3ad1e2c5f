"""CPU placeholders for the CUDA tensors that a function closes over, while the function is traced for a translation.

JAX decides where a program runs, so the graph does not depend on the device. During the trace, a closed-over CUDA
tensor is replaced by a CPU tensor of the same type without its values, and a request for a CUDA device gives the CPU.
After the trace, the CUDA tensors replace their placeholders in the graph.
"""

from __future__ import annotations

from typing import Any

import jax
import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from jtbridge._compat import FakeTensor, last_traced_node
from jtbridge.core.overlap import whole_storage

_NOTE = "closed_over"  # in `node.meta["custom"]`: the tensor that the node stands for
_TO = (torch.Tensor.to, torch.Tensor.type)


def may_be_on_gpu() -> bool:
    """Return whether this process can have tensors on a GPU."""
    return torch.cuda.is_available()


def on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on a GPU."""
    return tensor.device.type == "cuda"


class CudaAsCpuMode(TorchFunctionMode):
    """Replaces closed-over CUDA tensors by CPU placeholders while tracing."""

    def __init__(self) -> None:
        super().__init__()
        self._stand_ins = WeakTensorKeyDictionary()
        self._real = WeakTensorKeyDictionary()

    def stands_for(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the CUDA tensor that a placeholder stands for; None for any other tensor."""
        return self._real.get(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = jax.tree.map(self._moved, (tuple(args), dict(kwargs or {})))
        if func in _TO and isinstance(args[1] if len(args) > 1 else None, str):
            args = (args[0], _moved_name(args[1]), *args[2:])
        if isinstance(kwargs.get("device"), str):
            kwargs["device"] = _moved_name(kwargs["device"])
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)

    def _moved(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "cuda" else value
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or not on_gpu(value):
            return value
        if torch.is_autocast_enabled("cuda"):
            raise RuntimeError("it runs under autocast for CUDA, which chooses other dtypes than autocast for a CPU")
        found = self._stand_ins.get(value)
        if found is None:
            found = self._stand_ins[value] = self._stand_in(value)
            self._real[found] = value
        return found

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        shape, strides, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        if tensor.numel() and (offset or tensor.untyped_storage().nbytes() != tensor.nbytes):
            # Kernels may reach the rest of the storage, so the placeholder is a view of a placeholder for all of it.
            whole = whole_storage(tensor)
            memory = self._stand_in(whole)
            self._real[memory] = whole
            made = memory.as_strided(shape, strides, offset)
        else:
            made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="cpu")
        _note(tensor)
        return made.requires_grad_(tensor.requires_grad)


class _NodeTensor:
    """Holder of a tensor in a node's `meta`. Copies of the graph share the tensor."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __deepcopy__(self, memo: Any) -> _NodeTensor:
        return self


def _note(tensor: torch.Tensor) -> None:
    """Record in the last node of the graph which tensor replaces the node after the trace."""
    node = last_traced_node()
    if node is None:
        raise RuntimeError("a closed-over tensor on a GPU is used outside of a trace")
    node.meta["custom"] = {**(node.meta.get("custom") or {}), _NOTE: _NodeTensor(tensor)}


def _moved_name(name: str) -> str:
    return "cpu" if name.split(":")[0] == "cuda" else name


def with_closed_over(module: fx.GraphModule) -> None:
    """Replace the placeholders in a graph by the CUDA tensors that they stand for."""
    standing = [node for node in module.graph.nodes if _NOTE in (node.meta.get("custom") or {})]
    for i, node in enumerate(standing):
        name = f"_closed_over_{i}"
        setattr(module, name, node.meta["custom"][_NOTE].tensor)
        with module.graph.inserting_before(node):
            held = module.graph.create_node("get_attr", name)
        held.meta = {key: value for key, value in node.meta.items() if key != "custom"}
        node.replace_all_uses_with(held)
        module.graph.erase_node(node)
