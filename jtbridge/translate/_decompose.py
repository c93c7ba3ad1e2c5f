"""Operators without a lowering, by torch's own decompositions into others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch
from torch import fx

from jtbridge._compat import OpOverload, decomposition_of, forgetting_graph_sources, function_of_triton_operator
from jtbridge.capture import origin, trace_on

_KEY = "jtbridge_decomposition"


def decomposable(node: fx.Node) -> bool:
    """Whether torch has a decomposition of a node's operator."""
    return isinstance(node.target, OpOverload) and _decomposition_of(node.target) is not None


def _decomposition_of(operator: OpOverload) -> Callable | None:
    """Torch's decomposition, or for one made by ``torch.library.triton_op`` the function that it is made of."""
    return decomposition_of(operator) or function_of_triton_operator(operator)


def decomposition(node: fx.Node) -> fx.GraphModule:
    """The graph of a node's decomposition, of its tensor arguments in order. It is kept with the node."""
    if _KEY not in node.meta:
        run, tensors = _as_function(node)
        with torch.no_grad(), forgetting_graph_sources():
            module = trace_on(run, tensors, to_run=False)
        draws = 0
        for inner in module.graph.nodes:
            notes = {**origin(node), **{key: value for key, value in origin(inner).items() if key == "launch"}}
            if torch.Tag.nondeterministic_seeded in getattr(inner.target, "tags", ()):
                notes["draw"] = (*notes.get("draw", (0,)), draws)
                draws += 1
            inner.meta["custom"] = notes
        node.meta[_KEY] = module
    return node.meta[_KEY]


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node's decomposition."""
    leaves = jax.tree.leaves(_plain((node.args, node.kwargs), lambda x: x))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node) and isinstance(leaf.meta["val"], torch.Tensor)]


def _as_function(node: fx.Node) -> tuple[Callable[..., list[Any]], list[torch.Tensor]]:
    """A node's decomposition as a function of its tensor arguments, and tensors to trace it on."""
    plain = _plain((node.args, node.kwargs), lambda x: x.meta["val"])
    filled, tree = jax.tree.flatten(plain, is_leaf=lambda x: x is None)
    positions = [i for i, leaf in enumerate(filled) if isinstance(leaf, torch.Tensor)]
    function = _decomposition_of(node.target)  # type: ignore[arg-type]
    assert function is not None

    def run(*tensors: torch.Tensor) -> list[Any]:
        given = list(filled)
        for position, tensor in zip(positions, tensors, strict=True):
            given[position] = tensor
        args, kwargs = tree.unflatten(given)
        out = function(*args, **kwargs)
        return list(out) if isinstance(out, tuple | list) else [out]

    examples = [torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype) for x in (filled[i] for i in positions)]
    return run, examples


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
