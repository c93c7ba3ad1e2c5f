"""Repeated blocks of a graph as one JAX function, which is called for each block or is the body of a scan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx
from torch.fx.node import map_arg

from ._repetition import Draw, Repetition

Keys = Callable[[Sequence[int]], Callable[[], jax.Array]]
Run = Callable[[Sequence[Any], Keys], list[Any]]
_Block = Callable[[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]], Any]


def graph_of_block(repetition: Repetition) -> fx.GraphModule:
    """Return the graph of one block: from its inputs to the values that it carries, and then its results."""
    graph = fx.Graph()
    inputs: list[fx.Node] = []
    for number, source in enumerate(repetition.inputs):
        inputs.append(graph.placeholder(f"input_{number}"))
        inputs[-1].meta["val"] = source.nodes[0].meta["val"]
    uses = iter(repetition.uses)
    copies: dict[fx.Node, fx.Node] = {}

    def argument(node: fx.Node) -> fx.Node:
        place = next(uses)
        return copies[node] if place is None else inputs[place]

    block = repetition.blocks[0]
    for node in block:
        args, kwargs = map_arg((node.args, node.kwargs), argument)  # type: ignore[arg-type, misc]
        copies[node] = graph.create_node("call_function", node.target, args, kwargs)  # type: ignore[arg-type]
        copies[node].meta = dict(node.meta)
    carried = [copies[block[x.carried]] for x in repetition.inputs if x.carried is not None]
    graph.output((*carried, *(copies[block[i]] for i in repetition.results)))
    return fx.GraphModule({}, graph)


def run_blocks(
    repetition: Repetition, run: Run, values: Mapping[fx.Node, Any], keys: Keys, *, scan: bool
) -> dict[fx.Node, Any]:
    """Return the results of all blocks.

    Args:
        repetition: the blocks.
        run: the graph of one block as a JAX function.
        values: the values of the nodes outside of the blocks.
        keys: returns the key of a draw from its number.
        scan: whether a scan runs the blocks, over inputs stacked in each call; otherwise each block is a call.
    """
    each = (_scanned if scan else _called_blocks)(
        _Blocks.of(repetition, values), _block_function(repetition, run, keys)
    )
    return {
        nodes[i]: value
        for nodes, results in zip(repetition.blocks, each, strict=True)
        for i, value in zip(repetition.results, results, strict=True)
    }


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The inputs of all blocks of a repetition.

    Attributes:
        carry: the inputs of the first block that each later block gets from the block before it.
        own: the inputs that differ between blocks, each as a list of its values for all blocks.
        numbers: the numbers of each draw, of shape ``(blocks, ...)``.
        shared: the inputs that all blocks share.
        count: how many blocks there are.
        backwards: whether they are blocks of a backward.
    """

    carry: list[Any]
    own: list[list[Any]]
    numbers: list[np.ndarray]
    shared: list[Any]
    count: int
    backwards: bool

    @classmethod
    def of(cls, repetition: Repetition, values: Mapping[fx.Node, Any]) -> _Blocks:
        """Return the inputs of the blocks, grouped by how the blocks use them."""
        inputs = repetition.inputs
        return cls(
            carry=[values[x.nodes[0]] for x in inputs if x.carried is not None],
            own=[[values[node] for node in x.nodes] for x in inputs if len(x.nodes) > 1],
            numbers=[np.array(list(draws), np.uint32) for draws in repetition.draws.values()],
            shared=[values[x.nodes[0]] for x in inputs if x.carried is None and len(x.nodes) == 1],
            count=len(repetition.blocks),
            backwards=repetition.backwards,
        )


def _block_function(repetition: Repetition, run: Run, keys: Keys) -> _Block:
    """Return one block as a function from ``(carry, own, numbers, shared)`` to the next carry and the results."""
    carries = sum(x.carried is not None for x in repetition.inputs)

    def block(carry: Sequence[Any], own: Sequence[Any], numbers: Sequence[Any], shared: Sequence[Any]) -> Any:
        given = iter(carry), iter(own), iter(shared)
        arrays = [
            next(given[0] if x.carried is not None else given[1] if len(x.nodes) > 1 else given[2])
            for x in repetition.inputs
        ]
        found = run(arrays, _keys_of_block(keys, dict(zip(repetition.draws, numbers, strict=True))))
        return found[:carries], found[carries:]

    return block


def _called_blocks(blocks: _Blocks, block: _Block) -> list[list[Any]]:
    """Return the results of each block. All calls are of one function, which JAX traces and lowers once."""
    one = jax.jit(block)
    carry, each = blocks.carry, []
    for i in range(blocks.count):
        carry, results = one(carry, [x[i] for x in blocks.own], [n[i] for n in blocks.numbers], blocks.shared)
        each.append(results)
    return each


def _scanned(blocks: _Blocks, block: _Block) -> list[list[Any]]:
    """Return the results of each block, computed by a scan.

    The blocks of a backward are scanned in reverse. The residuals that the forward's scan returned are then stacked in
    their original order, so that XLA uses the array that they were cut from.
    """
    order = -1 if blocks.backwards else 1
    stacked = [jnp.stack(x[::order]) for x in blocks.own], [n[::order] for n in blocks.numbers]
    _, results = jax.lax.scan(
        lambda carry, x: block(carry, *x, blocks.shared), blocks.carry, stacked, blocks.count, reverse=order == -1
    )
    return [[x[i] for x in results] for i in range(blocks.count)[::order]]


def _keys_of_block(keys: Keys, numbers: Mapping[Draw, Any]) -> Keys:
    """Return the keys for one block. All blocks run one graph, whose draws have the numbers of the first block.

    Args:
        keys: returns the key of a draw from its number.
        numbers: the numbers of this block's draws, by the numbers of the first block's draws.
    """

    def of_draw(draw: Sequence[int]) -> Callable[[], jax.Array]:
        for count in range(len(draw), 0, -1):
            own = numbers.get(tuple(draw[:count]))
            if own is not None:
                return keys([*own, *draw[count:]])
        return keys(draw)

    return of_draw
