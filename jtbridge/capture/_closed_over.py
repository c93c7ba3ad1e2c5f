"""Tensors on a GPU that a function closes over: a translation takes it for a function of the CPU.

JAX decides where a program runs, so its graph need not know. While a function is traced, a tensor on a GPU is one of
the CPU, of which nothing but its type is there, and what asks for a GPU gets the CPU. In the graph that comes of it
the tensors themselves stand.
"""

from __future__ import annotations

from typing import Any

import jax
import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from jtbridge._compat import FakeTensor, last_traced_node

_NOTE = "closed_over"  # in a node's notes: the tensor that it stands for
_TO = (torch.Tensor.to, torch.Tensor.type)


def may_be_on_gpu() -> bool:
    """Whether this process can have tensors on a GPU."""
    return torch.cuda.is_available()


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies on a GPU."""
    return tensor.device.type == "cuda"


class CudaAsCpuMode(TorchFunctionMode):
    """While it is active, there is no GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._stand_ins = WeakTensorKeyDictionary()
        self._real = WeakTensorKeyDictionary()

    def stands_for(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor on a GPU in whose place one is; None if it is not."""
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
            raise RuntimeError("it runs under autocast for CUDA, which chooses other dtypes than that for a CPU")
        found = self._stand_ins.get(value)
        if found is None:
            found = self._stand_ins[value] = _stand_in(value)
            self._real[found] = value
        return found


class _NodeTensor:
    """A tensor in a node's notes: a copy of the graph holds the same."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __deepcopy__(self, memo: Any) -> _NodeTensor:
        return self


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    node = last_traced_node()
    if node is None:
        raise RuntimeError("a tensor on a GPU is used where nothing is traced")
    node.meta["custom"] = {**(node.meta.get("custom") or {}), _NOTE: _NodeTensor(tensor)}
    return made.requires_grad_(tensor.requires_grad)


def _moved_name(name: str) -> str:
    return "cpu" if name.split(":")[0] == "cuda" else name


def with_closed_over(module: fx.GraphModule) -> None:
    """Put the tensors themselves in the place of what stands for them."""
    standing = [node for node in module.graph.nodes if _NOTE in (node.meta.get("custom") or {})]
    for i, node in enumerate(standing):
        name = f"_closed_over_{i}"
        setattr(module, name, node.meta["custom"][_NOTE].tensor)
        with module.graph.inserting_before(node):
            held = module.graph.create_node("get_attr", name)
        held.meta = {key: value for key, value in node.meta.items() if key != "custom"}
        node.replace_all_uses_with(held)
        module.graph.erase_node(node)
