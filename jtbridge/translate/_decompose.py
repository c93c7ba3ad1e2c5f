"""Operators without a lowering, by torch's own decompositions into others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch import fx

from jtbridge._compat import OpOverload, decomposition_of, forgetting_graph_sources, function_of_triton_operator
from jtbridge.capture import FUSABLE_FUNCTIONS, origin, trace_on

_KEY = "jtbridge_decomposition"


def decomposable(node: fx.Node) -> bool:
    """Whether torch has a decomposition of a node's operator."""
    return isinstance(node.target, OpOverload) and _decomposition_of(node.target) is not None


def _decomposition_of(operator: OpOverload) -> Callable | None:
    """Torch's decomposition, or the function that ``torch.library.triton_op`` or a chain's operator is made of."""
    of_chain = FUSABLE_FUNCTIONS.get(operator.name())
    return of_chain or decomposition_of(operator) or function_of_triton_operator(operator)


def decomposition(node: fx.Node) -> fx.GraphModule:
    """The graph of a node's decomposition, of its tensor arguments in order. It is kept with the node."""
    if _KEY not in node.meta:
        plain = _plain((node.args, node.kwargs), lambda x: x.meta["val"])
        name = node.target.name()  # type: ignore[union-attr]
        node.meta[_KEY] = _of_chain(name, *map(_described, plain[0])) if name in FUSABLE_FUNCTIONS else _of(node, plain)
    return node.meta[_KEY]


def batched_decomposition(node: fx.Node, size: int, batched: Sequence[bool]) -> fx.GraphModule:
    """The graph of a node's operator over a batch, by its own batching rule.

    Args:
        node: the node, of one row.
        size: of the batch.
        batched: which of its tensor arguments have the batch as their first axis; all results have.
    """
    has_batch = iter(batched)
    leaves, tree = jax.tree.flatten(
        _plain((node.args, node.kwargs), lambda x: x.meta["val"]), is_leaf=lambda x: x is None
    )
    dims = [0 if isinstance(leaf, torch.Tensor) and next(has_batch) else None for leaf in leaves]
    whole = [x if dim is None else x.new_empty((size, *x.shape)) for x, dim in zip(leaves, dims, strict=True)]

    def row(args: Any, kwargs: Any) -> Any:
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def over_batch(*args: Any, **kwargs: Any) -> Any:
        return torch.vmap(row, tree.unflatten(dims))(args, kwargs)

    return _traced(over_batch, tree.unflatten(whole))


def _of(node: fx.Node, plain: Any) -> fx.GraphModule:
    """The operators that a node is made of, which lie where it does."""
    module = _traced(_decomposition_of(node.target), plain)  # type: ignore[arg-type]
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


def _described(value: Any) -> Any:
    return _Like(tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


@functools.lru_cache(maxsize=256)
def _of_chain(name: str, *arguments: Any) -> fx.GraphModule:
    """The operators of a chain: a model has many alike."""
    plain = [value.tensor() if isinstance(value, _Like) else value for value in arguments]
    module = _traced(FUSABLE_FUNCTIONS[name], (plain, {}))
    for inner in module.graph.nodes:
        inner.meta.pop("custom", None)  # of where the first of them lies
    return module


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node's decomposition."""
    leaves = jax.tree.leaves(_plain((node.args, node.kwargs), lambda x: x))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node) and isinstance(leaf.meta["val"], torch.Tensor)]


def _traced(function: Callable | None, plain: Any) -> fx.GraphModule:
    """The graph of a function of the tensors in some arguments."""
    assert function is not None
    filled, tree = jax.tree.flatten(plain, is_leaf=lambda x: x is None)
    positions = [i for i, leaf in enumerate(filled) if isinstance(leaf, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> list[Any]:
        given = list(filled)
        for position, tensor in zip(positions, tensors, strict=True):
            given[position] = tensor
        args, kwargs = tree.unflatten(given)
        out = function(*args, **kwargs)
        return list(out) if isinstance(out, tuple | list) else [out]

    examples = [torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype) for x in (filled[i] for i in positions)]
    with torch.no_grad(), forgetting_graph_sources():
        return trace_on(run, examples, to_run=False)


def _plain(arguments: Any, of_node: Callable[[fx.Node], Any]) -> Any:
    """A node's arguments in plain containers, which JAX can take apart; each node in them replaced."""
    if isinstance(arguments, fx.Node):
        return of_node(arguments)
    if isinstance(arguments, list | tuple):
        values = [_plain(value, of_node) for value in arguments]
        return tuple(values) if isinstance(arguments, tuple) else values
    if isinstance(arguments, dict):
        return {name: _plain(value, of_node) for name, value in arguments.items()}
    return arguments
