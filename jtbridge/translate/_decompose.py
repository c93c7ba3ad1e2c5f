"""Decompositions of operators without a lowering into other operators, by torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch import fx

from jtbridge._compat import OpOverload, decomposition_of, forgetting_graph_sources, function_of_triton_operator
from jtbridge.capture import FUSABLE_FUNCTIONS, GraphUse, origin, trace_on
from jtbridge.core.node_arguments import plain_arguments
from jtbridge.core.positions import replaced

_KEY = "jtbridge_decomposition"


def decomposable(node: fx.Node) -> bool:
    """Return whether a node's operator has a decomposition."""
    return isinstance(node.target, OpOverload) and _decomposing_function(node.target) is not None


def _decomposing_function(operator: OpOverload) -> Callable | None:
    """Return torch's decomposition, or the function of a fused chain or of a ``torch.library.triton_op`` operator."""
    of_chain = FUSABLE_FUNCTIONS.get(operator.name())
    return of_chain or decomposition_of(operator) or function_of_triton_operator(operator)


def decomposition(node: fx.Node) -> fx.GraphModule:
    """Return the graph of a node's decomposition, whose inputs are the node's tensor arguments. The node caches it."""
    if _KEY not in node.meta:
        plain = plain_arguments(node, lambda x: x.meta["val"])
        name = node.target.name()  # type: ignore[union-attr]
        node.meta[_KEY] = _of_chain(name, *map(_like, plain[0])) if name in FUSABLE_FUNCTIONS else _of(node, plain)
    return node.meta[_KEY]


def batched_decomposition(node: fx.Node, size: int, batched: Sequence[bool]) -> fx.GraphModule:
    """Return the graph of a node's operator over a batch, by the operator's batching rule.

    Args:
        node: the node, which is traced for one row.
        size: the size of the batch.
        batched: which tensor arguments have the batch as their first axis. All results have it.
    """
    has_batch = iter(batched)
    leaves, tree = jax.tree.flatten(plain_arguments(node, lambda x: x.meta["val"]), is_leaf=lambda x: x is None)
    dims = [0 if isinstance(leaf, torch.Tensor) and next(has_batch) else None for leaf in leaves]
    whole = [x if dim is None else x.new_empty((size, *x.shape)) for x, dim in zip(leaves, dims, strict=True)]

    def row(args: Any, kwargs: Any) -> Any:
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def over_batch(*args: Any, **kwargs: Any) -> Any:
        return torch.vmap(row, tree.unflatten(dims))(args, kwargs)

    return _graph_of_function(over_batch, tree.unflatten(whole))


def _of(node: fx.Node, plain: Any) -> fx.GraphModule:
    """Return the graph of a node's decomposition, whose nodes get the origin of the node."""
    module = _graph_of_function(_decomposing_function(node.target), plain)  # type: ignore[arg-type]
    draws = 0
    for inner in module.graph.nodes:
        notes = {**origin(node), **{key: value for key, value in origin(inner).items() if key == "launch"}}
        if torch.Tag.nondeterministic_seeded in getattr(inner.target, "tags", ()):
            notes["draw"] = (*notes.get("draw", (0,)), draws)
            draws += 1
        inner.meta["custom"] = notes
    return module


@dataclasses.dataclass(frozen=True)
class _Like:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


def _like(value: Any) -> Any:
    return _Like(tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


@functools.lru_cache(maxsize=256)
def _of_chain(name: str, *arguments: Any) -> fx.GraphModule:
    """Return the graph of a fused chain. It is cached because a model has many equal chains."""
    plain = [value.tensor() if isinstance(value, _Like) else value for value in arguments]
    module = _graph_of_function(FUSABLE_FUNCTIONS[name], (plain, {}))
    for inner in module.graph.nodes:
        inner.meta.pop("custom", None)  # it would be the origin of the first such chain
    return module


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a node's decomposition."""
    leaves = jax.tree.leaves(plain_arguments(node, lambda x: x))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node) and isinstance(leaf.meta["val"], torch.Tensor)]


def _graph_of_function(function: Callable | None, plain: Any) -> fx.GraphModule:
    """Return the graph of a function whose inputs are the tensors in the arguments `plain`."""
    assert function is not None
    filled, tree = jax.tree.flatten(plain, is_leaf=lambda x: x is None)
    positions = [i for i, leaf in enumerate(filled) if isinstance(leaf, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> list[Any]:
        args, kwargs = tree.unflatten(replaced(filled, positions, tensors))
        out = function(*args, **kwargs)
        return list(out) if isinstance(out, tuple | list) else [out]

    examples = [torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype) for x in (filled[i] for i in positions)]
    with torch.no_grad(), forgetting_graph_sources():
        return trace_on(run, examples, GraphUse.TRANSLATE)
