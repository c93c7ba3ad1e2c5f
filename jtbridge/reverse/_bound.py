"""A user's JAX function and its flat form for one signature."""

from __future__ import annotations

import contextlib
import functools
import numbers
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jtbridge._compat import (
    in_backward,
    in_forward_mode,
    is_tracing,
    is_transforming,
    outside_dynamo,
    outside_functorch,
)
from jtbridge.core.messages import kind_of
from jtbridge.core.nested_calls import is_inside, setting_inside
from jtbridge.core.pytree import in_order
from jtbridge.errors import ArgumentError, DTypeError, JaxCallError

from ._arguments import Arguments, split_arguments
from ._jax_function import JaxFunction, Types, empty_results, in_own_memory, store_entry, tensor_types, types_of
from ._operator import call
from ._reads import RecordReads, refuse_arguments, warn_of_missing_gradients
from ._tensors import runs_program

_MAX_SIGNATURES = 128  # flat functions that one torch function keeps


class FunctionInGraph(JaxFunction):
    """A JAX function that a graph of torch.compile calls. The graph is valid for one setting of x64."""

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results for tensors.

        Raises:
            JaxCallError: x64 has been turned on or off since torch traced the graph.
        """
        now = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        if now != self.x64 and not in_backward():
            before, after = ("on", "off") if self.x64 else ("off", "on")
            raise JaxCallError(
                f"torch.compile traced `{self.name}` while `jax_enable_x64` was {before}, and it is {after} now. The "
                "dtypes of the graph do not change: let torch trace it again, by `torch.compiler.reset()`."
            )
        return super().run(tensors)


class BoundFunction(JaxFunction):
    """The flat form of a user's function for the trees and static values of one signature."""

    def __init__(self, name: str, function: Callable[..., Any], arguments: Arguments, x64: bool):
        self._user_function = setting_inside(function, inside=False)
        self._arguments = arguments
        self._trees: dict[Types, Any] = {}
        super().__init__(name, self._flat, x64)

    def tree(self, types: Types) -> Any:
        """Return the structure of the result for arguments of some types."""
        found = self._trees.get(types)
        if found is None:
            structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
            with outside_functorch(), self._in_jax():
                jax.eval_shape(lambda *arrays: self._flat(*arrays), *structs)
            found = self._trees[types]
        return found

    def in_graph(self) -> FunctionInGraph:
        """Return this function for a graph of torch.compile."""
        found = self.derive("in graph", lambda: FunctionInGraph(self.name, self.function, self.x64))
        found.reads = self.reads
        return found

    def _flat(self, *arrays: Any) -> list[Any]:
        args, kwargs = self._arguments.rebuild(arrays)
        # Without jit the function runs in each call, also on tensors that derivatives made.
        traces = not jax.config.jax_disable_jit  # type: ignore[attr-defined]
        with RecordReads(self.name, self.reads) if traces else contextlib.nullcontext():
            leaves, tree = jax.tree.flatten(in_order(self._user_function(*args, **kwargs)))
        for leaf in leaves:
            _check_result(leaf, self.name)
        store_entry(self._trees, types_of(arrays), tree)
        return in_own_memory([jnp.asarray(leaf) for leaf in leaves])


def _check_result(leaf: Any, name: str) -> None:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise DTypeError(
            f"`{name}` returned an array of dtype `{leaf.dtype}`, which torch does not have. Return "
            "`jax.random.key_data(key)`."
        )
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | numbers.Number):
        raise ArgumentError(
            f"`{name}` returned {kind_of(leaf)}, which is not an array. Return arrays in tuples, lists, dicts "
            "or other pytrees."
        )


def _of_these_values(function: JaxFunction, tensors: Sequence[torch.Tensor]) -> JaxFunction:
    """Return the function with its current program fixed, for a call on values, so that derivatives match the values.

    Outside of torch transforms and modes this is not needed, because residuals belong to the values. If torch traces a
    graph, if the tensors may have no values, or without jit, return the function itself.
    """
    if is_tracing() or not runs_program(tensors):
        return function
    return function.as_of_now(tensor_types(tensors))


class Caller:
    """A user's JAX function with its flat forms, one for each signature.

    Args:
        function: the JAX function.
        name: its name.
        keep_int32: whether int32 results stay int32 while x64 is off.
    """

    def __init__(self, function: Callable[..., Any], name: str, *, keep_int32: bool):
        self._function = function
        self.name = name
        self._keep_int32 = keep_int32
        self._bound: dict[tuple[Arguments, bool], BoundFunction] = {}
        self._in_graphs: set[BoundFunction] = set()
        self._lock = threading.Lock()
        self._warned = False  # whether the user was warned about tensors without a gradient

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:  # `self` may be a keyword of the function
        results, tree = self.flat(args, kwargs)
        return tree.unflatten(results)

    def __copy__(self) -> Caller:
        """Return a caller without traces, because a copy of the caller may get a copy of the function."""
        return Caller(self._function, self.name, keep_int32=self._keep_int32)

    def __reduce__(self) -> Any:
        """Pickle the JAX function and its name. The unpickled caller traces the function again."""
        return functools.partial(Caller, keep_int32=self._keep_int32), (self._function, self.name)

    def objects_of_the_user(self) -> list[tuple[str, Any]]:
        """Return the JAX function, whose state the guard of an enclosing wrapped function restores after a trace."""
        return [("", self._function)]

    @outside_dynamo
    def flat(self, args: tuple, kwargs: dict[str, Any], *, in_graph: bool = False) -> tuple[list[torch.Tensor], Any]:
        """Return the leaves of the result, and its structure; `in_graph` is for a graph of torch.compile."""
        tensors, function = self._split(args, kwargs)
        if torch.compiler.is_compiling():
            self._in_graphs.add(function)  # a graph refers to the function only by its handle
        called = function.in_graph() if in_graph else function
        if is_transforming() or in_forward_mode():
            called = _of_these_values(called, tensors)
        if not tensors and torch.get_default_device().type == "meta":
            results = empty_results(called.result_types(()), torch.device("meta"))
        else:
            results = call(called, tensors)
        if function.reads and torch.is_grad_enabled():
            if is_inside():
                refuse_arguments(self.name, function.reads)
            elif not self._warned:
                self._warned = warn_of_missing_gradients(self.name, function.reads)
        if not function.x64 and not self._keep_int32:
            results = [x.to(torch.int64) if x.dtype is torch.int32 else x for x in results]
        return results, function.tree(tensor_types(tensors))

    def used_tensors(self, args: tuple, kwargs: dict[str, Any], count: int) -> list[bool]:
        """Return which tensors of the arguments the first `count` leaves of the result are computed from."""
        tensors, function = self._split(args, kwargs)
        return function.used_arguments(tensor_types(tensors), count)

    def structure(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of a call, with each tensor replaced by its position among the leaves."""
        tensors, function = self._split(args, kwargs)
        tree = function.tree(tensor_types(tensors))
        return tree.unflatten(range(tree.num_leaves))

    def _split(self, args: tuple, kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], BoundFunction]:
        """Return the tensors of the arguments, and the flat form of the function for the rest of them."""
        tensors, arguments = split_arguments(self.name, args, kwargs)
        x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        return tensors, self._bound.get((arguments, x64)) or self._bind(arguments, x64)

    def _bind(self, arguments: Arguments, x64: bool) -> BoundFunction:
        with self._lock:
            found = self._bound.get((arguments, x64))
            if found is None:
                found = BoundFunction(self.name, self._function, arguments, x64)
                if len(self._bound) >= _MAX_SIGNATURES:
                    del self._bound[next(iter(self._bound))]
                self._bound[arguments, x64] = found
        return found
