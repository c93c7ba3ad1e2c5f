"""Statistics of layer normalization in half precision: torch keeps them in float32 on a GPU, and rounds on a CPU."""

from __future__ import annotations

import operator

import torch
from torch import fx

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)


def keep_statistics_wide(graph: fx.Graph) -> None:
    """Give mean and 1 / sigma the dtype that they have on a GPU, if only the backward uses them.

    The normalization itself uses them in float32 anyway. With this dtype its gradient does so, too, and a kernel that
    keeps them in float32 can compute both.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.native_layer_norm.default):
        value = node.meta["val"]
        results: list[fx.Node] = [user for user in node.users if user.target is operator.getitem and user.args[1] > 0]
        seen = [user.target for result in results for user in result.users]
        if value[1].dtype in _HALF and all(target is _aten.native_layer_norm_backward.default for target in seen):
            node.meta["val"] = tuple(x.to(torch.float32) if i else x for i, x in enumerate(value))
            for result in results:
                result.meta["val"] = node.meta["val"][result.args[1]]  # type: ignore[index]
