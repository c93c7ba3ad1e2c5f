"""Calls of JAX functions inside functions that torch.compile traces.

TorchDynamo traces Python code, and cannot trace JAX's. While it traces, a call goes to a function that becomes one node
of its graph, because `torch.compiler.allow_in_graph` was called with it. `allow_in_graph` imports TorchDynamo, which
takes a second, so this happens in the first call that TorchDynamo traces. Torch's later passes run the function and see
its operators.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from jtbridge._compat import mark_constant_for_dynamo
from jtbridge.core.messages import kind_of
from jtbridge.errors import ArgumentError

from ._bound import Caller

_LEAF = "leaf"


def call_in_graph(caller: Caller) -> Callable[..., Any]:
    """Return `caller` as a function that TorchDynamo can trace. Its result consists of tuples, lists and dicts."""
    identity = uuid.uuid4().hex  # TorchDynamo guards the code of a function, which all callers share, and this text
    structure: list[Any] = []  # of the last result: TorchDynamo reads it right after it has run the function
    untraced: list[Callable[..., Any]] = []

    def compute(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        in_graph = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        leaves, tree = caller.flat(*_mutable((args, kwargs)), in_graph=in_graph)
        structure[:] = [_described(tree.unflatten(list(range(len(leaves)))), caller.name)]
        return leaves

    def results(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return untraced[0](*args, **kwargs)

    def allow(identity: str) -> None:
        del identity
        torch.compiler.allow_in_graph(results)
        # If TorchDynamo cannot put an argument into a graph, it runs `results`, and traces the code called there.
        untraced[:] = [torch.compiler.disable(compute)]

    def last_structure() -> Any:
        return structure[0]

    mark_constant_for_dynamo(allow)
    mark_constant_for_dynamo(last_structure)

    def call(args: Any, kwargs: Any) -> Any:
        allow(identity)
        leaves = results(*args, **kwargs)
        return _rebuilt(last_structure(), leaves)

    return call


def _mutable(value: Any) -> Any:
    """Replace the immutable lists and dicts of an FX graph by plain ones, which are pytrees for JAX."""
    kind = type(value)
    if kind in (tuple, list, immutable_list):
        children = [_mutable(child) for child in value]
        return tuple(children) if kind is tuple else children
    if kind in (dict, immutable_dict):
        return {key: _mutable(child) for key, child in value.items()}
    return value


def _described(value: Any, name: str) -> Any:
    """Describe a result, with numbers in place of tensors, by constants, which TorchDynamo can store."""
    if isinstance(value, int):
        return _LEAF, value
    if value is None or type(value) in (tuple, list):
        children = () if value is None else tuple(_described(child, name) for child in value)
        return type(value).__name__, children
    if type(value) is dict:
        return "dict", tuple((key, _described(child, name)) for key, child in value.items())
    raise ArgumentError(
        f"`{name}` returned {kind_of(value)} inside torch.compile, which traces only results of tuples, lists "
        "and dicts. Return one of these, or call the function outside of the compiled function."
    )


def _rebuilt(description: Any, leaves: list[torch.Tensor]) -> Any:
    kind, content = description
    if kind == _LEAF:
        return leaves[content]
    if kind == "dict":
        return {key: _rebuilt(child, leaves) for key, child in content}
    if kind == "NoneType":
        return None
    children = [_rebuilt(child, leaves) for child in content]
    return tuple(children) if kind == "tuple" else children
