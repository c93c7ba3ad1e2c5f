"""Which operators torch runs faster than XLA, by the measurements in `measured/`.

`make bench-operators` writes them: for each operator, the time of a program in which XLA runs it, and of one in which
torch does. An operator counts as faster in torch from the first measured size after the last size that torch lost.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
from collections.abc import Callable
from importlib import resources
from typing import Any

import torch
from torch import fx

from jtbridge._compat import OpOverload
from jtbridge.core import tuning
from jtbridge.core.transposed import is_transposed

# How many times faster torch has to be: the measurements are noisy, and XLA may fuse an operator with its neighbours.
_MARGIN = 1.15
# How much time torch has to save: a call also waits for Python's lock, and separates operators that XLA would fuse.
_MIN_SAVED_US = 20.0
_LONG_US = 30.0  # the least time in XLA for which tuning may save time: a call out of XLA takes about 10 us
_PLATFORMS = ("cpu",)  # the platforms for which `measured/` has a file
# Operators along one dimension, whose time depends on its length.
_ALONG_ROWS = (
    "cummax.default",
    "cummin.default",
    "cumprod.default",
    "cumsum.default",
    "kthvalue.default",
    "logcumsumexp.default",
    "median.dim",
    "mode.default",
    "sort.default",
    "sort.stable",
    "topk.default",
)
_DIM_IS_THIRD = ("aten.sort.stable", "aten.topk.default", "aten.kthvalue.default")


@dataclasses.dataclass(frozen=True)
class Workload:
    """The properties of a call of an operator that determine its time.

    Attributes:
        operator: the name of the operator.
        kind: the algorithm that the arguments ask for, such as "depthwise 2d"; "" if there is only one.
        dtype: the dtype of the first tensor.
        size: the number of products or of elements.
    """

    operator: str
    kind: str
    dtype: str
    size: int

    @property
    def name(self) -> str:
        """The name of the operator, with the kind."""
        return f"{self.operator} ({self.kind})" if self.kind else self.operator

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of a measurement."""
        return self.operator, self.kind, self.dtype

    def of_rows(self, rows: int) -> Workload:
        """Return the workload of the operator for a batch of `rows` rows."""
        return dataclasses.replace(self, size=rows * self.size)


def workload_of(node: fx.Node) -> Workload | None:
    """Return the workload of a node with an ATen operator on arrays of known sizes; None for other nodes."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    tensors = [x for x in map(tensor_of, node.all_input_nodes) if isinstance(x, torch.Tensor)]
    if not tensors or not all(isinstance(size, int) for x in tensors for size in x.shape):
        return None
    kind, size = _MEASURES.get(str(target), _of_elements)(node, tensors)
    return Workload(str(target), kind, str(tensors[0].dtype).removeprefix("torch."), size)


def may_be_faster(workload: Workload) -> bool:
    """Return whether torch may run an operator faster than XLA, on some platform and for a batch of some size.

    On a machine where choices are tuned, this is every operator that was measured.
    """
    table = _points if may_be_tuned() else _measurements
    return any(table(platform).get(workload.key) for platform in _PLATFORMS)


def may_be_tuned() -> bool:
    """Return whether choices between torch and XLA may have been tuned on this machine."""
    return tuning.has_results("aten.*.json")


def takes_long(workload: Workload, platform: str) -> bool:
    """Return whether XLA takes so long for an operator, by the measurements, that tuning may save time."""
    points = _points(platform).get(workload.key, ())
    return any(microseconds * min(1.0, workload.size / size) >= _LONG_US for size, microseconds, _ in points)


def faster_reason(workload: Workload, platform: str) -> str | None:
    """Return why torch runs an operator on a platform; None if XLA is not measured to be slower."""
    points = _measurements(platform).get(workload.key, ())
    reached = [(size, ratio) for size, ratio in points if size <= workload.size]
    if not reached:
        return None
    size, ratio = reached[-1]
    return (
        f"torch runs `{workload.name}` in {workload.dtype} {ratio:.1f} times faster than XLA on this platform, as "
        f'measured at {size:.1e} products or elements. `islands="needed"` leaves it to XLA'
    )


@functools.cache
def _measurements(platform: str) -> dict[tuple[str, str, str], tuple[tuple[int, float], ...]]:
    """Return by operator, kind and dtype the sizes from which torch is faster, each with the ratio of the times."""
    return {key: _won(points) for key, points in _points(platform).items()}


@functools.cache
def _points(platform: str) -> dict[tuple[str, str, str], list[tuple[int, float, float]]]:
    """Return by operator, kind and dtype the sizes in order, each with the microseconds of XLA and of an island."""
    file = resources.files("jtbridge.translate") / "measured" / f"{platform}.json"
    if not file.is_file():
        return {}
    points: dict[tuple[str, str, str], list[tuple[int, float, float]]] = {}
    for row in json.loads(file.read_text())["rows"]:
        key = row["operator"], row["kind"], row["dtype"]
        points.setdefault(key, []).append((row["size"], row["xla_us"], row["island_us"]))
    return {key: sorted(of_key) for key, of_key in points.items()}


def _won(points: list[tuple[int, float, float]]) -> tuple[tuple[int, float], ...]:
    """Return (size, ratio of the times) of the measurements after the last one that torch did not win."""
    lost = [i for i, (_, xla, island) in enumerate(points) if xla < max(_MARGIN * island, island + _MIN_SAVED_US)]
    return tuple((size, xla / island) for size, xla, island in points[lost[-1] + 1 if lost else 0 :])


def _form(weight: torch.Tensor, transposed: bool, groups: int) -> str:
    kernel = math.prod(weight.shape[2:])
    if groups > 1:
        # XLA's time per product is different for 3 x 3 kernels and for 7 x 7 kernels.
        small = "small " * (weight.ndim == 4 and kernel <= 9)
        form = f"{small}depthwise" if 1 in weight.shape[:2] else "grouped"
    else:
        form = "pointwise" if kernel == 1 else "dense"
    return f"{'transposed ' * transposed}{form} {weight.ndim - 2}d"


def _count_products(x: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, transposed: bool) -> int:
    # One row of weights is used for each element: of the input if the convolution is transposed, else of the result.
    elements = x.numel() if transposed else result.numel()
    return elements * math.prod(weight.shape[1:])


def _of_convolution(node: fx.Node, tensors: list[torch.Tensor]) -> tuple[str, int]:
    x, weight = _tensor_arguments(node)[:2]
    *_, transposed, _, groups = node.args
    return (
        _form(weight, bool(transposed), int(groups)),  # type: ignore[arg-type]
        _count_products(x, weight, node.meta["val"], bool(transposed)),
    )


def _of_convolution_backward(node: fx.Node, tensors: list[torch.Tensor]) -> tuple[str, int]:
    grad, x, weight = _tensor_arguments(node)[:3]
    *_, transposed, _, groups, mask = node.args
    wanted = [name for name, is_wanted in zip(("input", "weight"), mask, strict=False) if is_wanted]  # type: ignore[arg-type]
    form = _form(weight, bool(transposed), int(groups))  # type: ignore[arg-type]
    return f"{form} by {' and '.join(wanted) or 'bias'}", _count_products(x, weight, grad, bool(transposed))


def _of_matmul(node: fx.Node, tensors: list[torch.Tensor]) -> tuple[str, int]:
    first, second = _array_nodes(node)[-2:]
    kind = "first transposed" if is_transposed(first) else ""  # such as in the gradient of a weight
    return kind, node.meta["val"].numel() * tensor_of(second).shape[-2]


def _of_attention(node: fx.Node, tensors: list[torch.Tensor]) -> tuple[str, int]:
    first, causal = (1, 7) if "backward" in str(node.target) else (0, 4)
    query, key = _tensor_arguments(node)[first : first + 2]
    is_causal = node.args[causal] if len(node.args) > causal else node.kwargs.get("is_causal", False)
    return "causal" if is_causal else "", query.numel() * key.shape[-2]


def _of_rows(node: fx.Node, tensors: list[torch.Tensor]) -> tuple[str, int]:
    """Return the kind and size of an operator along one dimension, whose length determines the time per element."""
    x = tensors[0]
    position = 2 if str(node.target) in _DIM_IS_THIRD else 1
    dim = node.kwargs.get("dim", node.args[position] if len(node.args) > position else -1)
    if not isinstance(dim, int) or x.ndim == 0:
        return "", x.numel()
    return ("short rows" if x.shape[dim] < 64 else "long rows"), x.numel()


def _of_max_pool(node: fx.Node, tensors: list[torch.Tensor]) -> tuple[str, int]:
    """Return the kind and size. Torch always computes the indices, XLA only if they are used, such as by a gradient."""
    uses_indices = any(user.target is operator.getitem and user.args[1] == 1 for user in node.users)
    return "" if uses_indices else "values alone", _of_elements(node, tensors)[1]


def _of_index(node: fx.Node, tensors: list[torch.Tensor]) -> tuple[str, int]:
    index = node.args[2]
    takes_rows = isinstance(index, fx.Node) and index.target is torch.ops.aten.expand.default
    return "rows" if takes_rows else "", _of_elements(node, tensors)[1]


def _of_elements(node: fx.Node, tensors: list[torch.Tensor]) -> tuple[str, int]:
    results = node.meta["val"]
    results = results if isinstance(results, list | tuple) else [results]
    every = [*tensors, *(x for x in results if isinstance(x, torch.Tensor))]
    return "", max(x.numel() for x in every)


def _tensor_arguments(node: fx.Node) -> list[torch.Tensor]:
    """Return the tensors among the positional arguments; a tensor that is passed twice occurs twice."""
    return [tensor_of(x) for x in _array_nodes(node)]


def _array_nodes(node: fx.Node) -> list[fx.Node]:
    return [x for x in node.args if isinstance(x, fx.Node)]


def tensor_of(node: fx.Node) -> Any:
    """Return the fake tensor of an argument, or its constant."""
    if node.op == "get_attr":
        return getattr(node.graph.owning_module, str(node.target), None)
    return node.meta.get("val")


_MEASURES: dict[str, Callable[[fx.Node, list[torch.Tensor]], tuple[str, int]]] = {
    "aten.convolution.default": _of_convolution,
    "aten.convolution_backward.default": _of_convolution_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _of_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _of_attention,
    **dict.fromkeys([f"aten.{name}.default" for name in ("mm", "bmm", "addmm", "baddbmm")], _of_matmul),
    **dict.fromkeys([f"aten.{name}" for name in _ALONG_ROWS], _of_rows),
    **dict.fromkeys([f"aten.max_pool{n}d_with_indices.default" for n in (2, 3)], _of_max_pool),
    **dict.fromkeys(("aten.gather.default", "aten.scatter_add.default", "aten.scatter_reduce.two"), _of_index),
}
