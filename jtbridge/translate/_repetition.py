"""Repeated blocks of a graph: stretches of nodes that compute the same operators, one after the other.

The layers of a model are such blocks. So are the steps of their backward, in reverse order. Two blocks are equal if
their operators, static arguments, shapes, strides and dtypes are equal, and each argument of an operator comes

- from the same place of its own block,
- from the same place of the block before (a value that is carried), or
- from outside of all blocks: from one node for all blocks, or from a node for each (a weight).

Nodes that do not have this form are left as they are.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_arg

from jtbridge._compat import OpOverload
from jtbridge.capture import from_bytes, origin
from jtbridge.core.writes import returns_view

_MIN_BLOCKS = 3
_MIN_SAVED = 24  # the fewest nodes in the later blocks, which are not translated again
_MAX_STARTS = 8  # the most places that are tried as the beginning of a block

Draw = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of all blocks.

    Attributes:
        nodes: the nodes outside of the blocks that have the value: one node for all blocks, or one for each block. The
            one node of a carried input has the value for the first block.
        carried: the position in a block of the value that the next block takes; None if it is not carried.
    """

    nodes: tuple[fx.Node, ...]
    carried: int | None = None


@dataclasses.dataclass(frozen=True)
class Repetition:
    """Equal blocks that follow each other.

    Attributes:
        blocks: the nodes of each block, in the same order.
        inputs: the inputs of all blocks.
        uses: for each place of a block where a node has an input as an argument, the position of the input in `inputs`.
            The places are counted over all nodes of a block, in the order in which `map_arg` visits them; the value is
            None for an argument from the block itself.
        results: the positions in a block of the nodes that are used after the blocks.
        draws: for each draw of the first block, the numbers of this draw in all blocks.
        backwards: whether most inputs of the first blocks come after those of the last blocks in the graph, as in the
            backward of a model.
    """

    blocks: tuple[tuple[fx.Node, ...], ...]
    inputs: tuple[Input, ...]
    uses: tuple[int | None, ...]
    results: tuple[int, ...]
    draws: Mapping[Draw, tuple[Draw, ...]]
    backwards: bool


def with_repetitions(nodes: Sequence[fx.Node], constants: Mapping[fx.Node, np.ndarray]) -> list[fx.Node | Repetition]:
    """Return the nodes of a graph in an order in which they can be run, with repetitions in place of their nodes.

    Args:
        nodes: the nodes to run, in order.
        constants: the nodes whose values are known, with the values.
    """
    if any("jax_shapes" in node.meta for node in nodes):  # symbolic sizes
        return list(nodes)
    order = _scheduled(nodes, constants)
    first = next(i for i, node in enumerate(order) if _is_run(node, constants) or node.op == "output")
    graph = _Graph(order, constants)
    return [*order[:first], *_with_repetitions(graph, first, len(order) - 1), order[-1]]


def _is_run(node: fx.Node, constants: Mapping[fx.Node, Any]) -> bool:
    return node.op not in ("placeholder", "output") and node not in constants


def _scheduled(nodes: Sequence[fx.Node], constants: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """Return the nodes in another order: inputs and constants first, and views of inputs before their first use.

    The partition of a joint graph puts all views that the backward computes again at the beginning of the backward.
    """
    order = [node for node in nodes if not _is_run(node, constants) and node.op != "output"]
    of_inputs = set(order)
    late = set[fx.Node]()
    for node in nodes:
        if _is_run(node, constants) and _is_view_or_item(node) and of_inputs.issuperset(node.all_input_nodes):
            of_inputs.add(node)
            late.add(node)

    def put(node: fx.Node) -> None:
        for used in node.all_input_nodes:
            if used in late:
                late.discard(used)
                put(used)
        order.append(node)

    for node in nodes:
        if node.op == "output" or (_is_run(node, constants) and node not in late and node not in of_inputs):
            put(node)
    return order


def _is_view_or_item(node: fx.Node) -> bool:
    if node.target in (from_bytes, operator.getitem, torch.ops.aten.reshape.default):
        return True
    return isinstance(node.target, OpOverload) and returns_view(node.target)


class _Graph:
    """A scheduled graph, with the facts about each node that the search needs.

    Attributes:
        nodes: the nodes, in order.
        ids: a number for each node. Nodes with equal numbers differ at most in where their arguments come from.
        position: the position of each node.
        last_use: the position of the last node that uses each node.
    """

    def __init__(self, nodes: Sequence[fx.Node], constants: Mapping[fx.Node, np.ndarray]):
        self.nodes = nodes
        self.position = {node: i for i, node in enumerate(nodes)}
        self.arguments = [_argument_nodes(node) for node in nodes]
        known: dict[Any, int] = {}
        self.ids = np.array([known.setdefault(_signature(node), len(known)) for node in nodes])
        self.constants = constants
        self.users: dict[fx.Node, list[int]] = {}
        for i, arguments in enumerate(self.arguments):
            for node in arguments:
                self.users.setdefault(node, []).append(i)

    def same_value(self, nodes: Sequence[fx.Node]) -> bool:
        """Return whether nodes are one node, or constants with the same bits."""
        if len(set(nodes)) == 1:
            return True
        if not all(node in self.constants for node in nodes):
            return False
        values = [self.constants[node] for node in nodes]
        first = values[0]
        return all(
            value.dtype == first.dtype and value.shape == first.shape and value.tobytes() == first.tobytes()
            for value in values[1:]
        )


def _argument_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes in the arguments of a node, in order, as often as they occur."""
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs), found.append)  # type: ignore[arg-type]
    return found


def _signature(node: fx.Node) -> Any:
    """Return a key that is equal for two nodes that compute the same from arguments of the same types."""
    if node.op != "call_function":
        return node  # equal only to itself
    notes = origin(node)
    arguments = _argument_nodes(node)
    static = map_arg((node.args, node.kwargs), lambda _: _ARGUMENT)  # type: ignore[arg-type, return-value]
    return (
        node.target,
        repr(static),
        tuple(_type_key(argument.meta.get("val")) for argument in arguments),
        _type_key(node.meta.get("val")),
        bool(notes.get("backward")),
        repr(notes.get("launch")),
        len(notes.get("draw", ())),
    )


class _Argument:
    def __repr__(self) -> str:
        return "an argument"


_ARGUMENT: Any = _Argument()


def _type_key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else None
        return tuple(value.shape), value.dtype, strides, value.layout
    return tuple(map(_type_key, value)) if isinstance(value, list | tuple) else repr(value)


def _with_repetitions(graph: _Graph, start: int, end: int) -> Iterator[fx.Node | Repetition]:
    """Yield the nodes between two positions, with repetitions in place of their nodes.

    The longest repetition is found first, then those before and after it.
    """
    found = _longest(graph, start, end)
    if found is None:
        yield from graph.nodes[start:end]
        return
    first, last = graph.position[found.blocks[0][0]], graph.position[found.blocks[-1][-1]]
    yield from _with_repetitions(graph, start, first)
    yield found
    yield from _with_repetitions(graph, last + 1, end)


def _longest(graph: _Graph, start: int, end: int) -> Repetition | None:
    """Return the repetition between two positions that saves the most nodes; None if there is none."""
    ids = graph.ids[start:end]
    candidates: list[tuple[int, int, int, int]] = []  # (nodes saved, -period, first position, equal positions)
    for period in range(1, len(ids) // 2 + 1):
        equal = np.concatenate([[False], ids[:-period] == ids[period:], [False]])
        edges = np.flatnonzero(np.diff(equal.astype(np.int8)))
        for first, stop in zip(edges[::2], edges[1::2], strict=True):
            saved = (stop - first) // period * period
            if saved >= max(_MIN_SAVED, (_MIN_BLOCKS - 1) * period):
                candidates.append((int(saved), -period, start + int(first), int(stop - first)))
    for saved, negative, first, length in sorted(candidates, reverse=True)[:_MAX_STARTS]:
        period = -negative
        found = _at_best_start(graph, first, length, period)
        if found is not None and (len(found.blocks) - 1) * period * 2 >= saved:
            return found
    return None


def _at_best_start(graph: _Graph, first: int, length: int, period: int) -> Repetition | None:
    """Return the repetition in a stretch of equal signatures whose blocks begin where the fewest values are carried."""
    found: list[Repetition] = []
    starts = range(first, first + min(period, length - (_MIN_BLOCKS - 1) * period + 1))
    end = first + length + period
    carried = _carried_counts(graph, first, end, period)
    for start in sorted(starts, key=lambda start: (carried[start - first], start))[:_MAX_STARTS]:
        repetition = _repetition(graph, start, period, (end - start) // period)
        if repetition is not None:
            found.append(repetition)
    return max(found, key=lambda r: (len(r.blocks), -len(r.inputs)), default=None)


def _carried_counts(graph: _Graph, first: int, end: int, period: int) -> list[int]:
    """Return, for each of `period` possible starts of a block, how many values the block takes from earlier blocks.

    The values are counted for a block in the middle of the stretch. Values from before the stretch do not count.
    """
    middle = first + (end - first) // (2 * period) * period
    crossing = np.zeros(end - first + 1, int)
    for i in range(first, end):
        last = max((user for user in graph.users.get(graph.nodes[i], ()) if user < end), default=i)
        crossing[i + 1 - first] += 1
        crossing[last + 1 - first] -= 1
    counts = np.cumsum(crossing)
    return [int(counts[middle - first + i]) for i in range(period)]


def _repetition(graph: _Graph, start: int, period: int, count: int) -> Repetition | None:
    """Return the longest repetition among the blocks of a stretch of equal signatures; None if there is none."""
    arguments = [
        [x for i in range(start + b * period, start + (b + 1) * period) for x in graph.arguments[i]]
        for b in range(count)
    ]
    origins = [[_origin_in_blocks(graph, x, start, b, period) for x in arguments[b]] for b in range(count)]
    first, last = _longest_stretch(origins)
    if last - first + 1 < _MIN_BLOCKS:
        return None
    start, count = start + first * period, last - first + 1
    return _of_blocks(graph, start, period, arguments[first : last + 1], origins[first + 1])


# Where an argument comes from: the position in its own block; -1 minus the position in the block before; `_OUTSIDE`,
# before all blocks; or `_ELSEWHERE`, in another block.
_OUTSIDE, _ELSEWHERE = "outside", "elsewhere"
_Origin = int | str


def _origin_in_blocks(graph: _Graph, node: fx.Node, start: int, block: int, period: int) -> _Origin:
    place = graph.position[node] - start
    if place < 0:
        return _OUTSIDE
    found, inside = divmod(place, period)
    if found == block:
        return inside
    return -1 - inside if found == block - 1 else _ELSEWHERE


def _longest_stretch(origins: Sequence[Sequence[_Origin]]) -> tuple[int, int]:
    """Return the first and the last block of the longest stretch of blocks that are equal.

    Blocks are equal if each argument comes from the same position of the block itself or of the block before it, or
    from outside of the blocks. The first block of a stretch may take its inputs from anywhere.
    """
    best = (0, 0)
    for first in range(len(origins) - 1):
        if first + 1 < best[1]:  # a stretch that begins here would be shorter
            continue
        last = first + 1
        if _ELSEWHERE in origins[last] or not _can_be_first(origins[first], origins[last]):
            continue
        while last + 1 < len(origins) and origins[last + 1] == origins[last]:
            last += 1
        best = max(best, (first, last), key=lambda stretch: stretch[1] - stretch[0])
    return best


def _can_be_first(first: Sequence[_Origin], second: Sequence[_Origin]) -> bool:
    return all(a == b or not (_is_in_block(a) or _is_in_block(b)) for a, b in zip(first, second, strict=True))


def _is_in_block(place: _Origin) -> bool:
    return isinstance(place, int) and place >= 0


def _of_blocks(
    graph: _Graph, start: int, period: int, arguments: Sequence[Sequence[fx.Node]], origins: Sequence[_Origin]
) -> Repetition | None:
    """Return equal blocks with their inputs and results.

    Return None if an input or a result of a block is not a tensor, or if the draws of the blocks do not correspond.
    """
    count = len(arguments)
    end = start + count * period
    blocks = tuple(tuple(graph.nodes[start + b * period : start + (b + 1) * period]) for b in range(count))
    inputs: dict[Input, int] = {}
    uses: list[int | None] = []
    for place, source in enumerate(origins):
        if _is_in_block(source):
            uses.append(None)
            continue
        nodes = tuple(arguments[b][place] for b in range(count))
        if isinstance(source, int):
            found = Input(nodes[:1], -1 - source)
        else:
            found = Input(nodes[:1] if graph.same_value(nodes) else nodes)
        uses.append(inputs.setdefault(found, len(inputs)))
    results = tuple(
        i for i in range(period) if any(user >= end for block in blocks for user in graph.users.get(block[i], ()))
    )
    crossing = [*(node for x in inputs for node in x.nodes), *(blocks[0][i] for i in results)]
    crossing += [blocks[0][x.carried] for x in inputs if x.carried is not None]
    if not all(isinstance(node.meta.get("val"), torch.Tensor) for node in crossing):
        return None
    draws = _draws_of_blocks(blocks)
    if draws is None:
        return None
    orders = [np.sign(graph.position[x.nodes[-1]] - graph.position[x.nodes[0]]) for x in inputs]
    return Repetition(blocks, tuple(inputs), tuple(uses), results, draws, bool(np.sum(orders) < 0))


def _draws_of_blocks(blocks: Sequence[Sequence[fx.Node]]) -> dict[Draw, tuple[Draw, ...]] | None:
    """Return the numbers of the draws of all blocks, by those of the first; None if they do not correspond."""
    found: dict[Draw, tuple[Draw, ...]] = {}
    for same in zip(*blocks, strict=True):
        numbers = tuple(tuple(origin(node).get("draw", ())) for node in same)
        if numbers[0] and found.setdefault(numbers[0], numbers) != numbers:
            return None
    return found
