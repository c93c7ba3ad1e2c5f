"""From a torch function to what is known of it: types, behaviour, and its forward and backward graphs."""

from ._infer import Inference, Request, infer
from ._joint import GraphFunction, Split, forward_graph, split
from ._probe import check_differentiable, probe_vmap

__all__ = [
    "GraphFunction",
    "Inference",
    "Request",
    "Split",
    "check_differentiable",
    "forward_graph",
    "infer",
    "probe_vmap",
    "split",
]
