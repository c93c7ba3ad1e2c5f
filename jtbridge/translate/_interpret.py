"""Interpretation of a functional ATen graph in JAX, one lowering per node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.custom_batching import custom_vmap
from torch import fx
from torch.fx.node import map_arg

from jtbridge._compat import FakeTensor, OpOverload, has_batching_rule, is_zero
from jtbridge.capture import from_bytes, materialized_tensor, origin, to_bytes
from jtbridge.core.dtypes import numpy_dtype
from jtbridge.core.functions import TracedFunction
from jtbridge.core.host_memory import to_numpy
from jtbridge.core.materialized import materialized
from jtbridge.core.messages import kind_of
from jtbridge.core.runner import unrecorded_tensor_error
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.errors import LoweringError, TranslationError
from jtbridge.lowerings import Lowering, find, find_kernel

from ._blocks import Keys, graph_of_block, run_blocks
from ._decompose import batched_decomposition, decomposition, tensor_inputs
from ._fold import folded, needed_nodes
from ._islands import bind_choice, bind_island, ineligible_reason, is_forced, workload_for_torch
from ._operators import describe_node, is_known, missing_lowering_reason, without_lowering
from ._regions import bind_region, regions_of
from ._repetition import Repetition, with_repetitions


def _numpy_constant(tensor: torch.Tensor) -> np.ndarray:
    if is_zero(tensor):
        return np.zeros(tuple(tensor.shape), numpy_dtype(tensor.dtype, "a constant"))
    if isinstance(tensor, FakeTensor):
        raise unrecorded_tensor_error()
    if tensor.device.type not in ("cpu", "cuda"):
        raise TranslationError(f"its graph has a constant on device `{tensor.device}`, which JAX cannot hold")
    return to_numpy(tensor.cpu())


def _constant_array(value: Any) -> jax.Array:
    """Return a constant as an array, or as a broadcast number if all its elements have the same bits.

    Bits are compared because 0.0 and -0.0 differ, but are equal for ``==``.
    """
    if value.size > 1:
        elements = np.ascontiguousarray(value).reshape(-1).view(np.uint8).reshape(value.size, -1)
        if (elements == elements[0]).all():
            return jnp.full(value.shape, value.flat[0])
        if value.dtype.kind == "c" and _has_negative_zero(value):
            return jax.lax.complex(_constant_array(np.real(value)), _constant_array(np.imag(value)))
        if _has_negative_zero(value):
            # XLA merges constants that compare equal, so it could use [0.0, 1.0] for [-0.0, 1.0]. Their bits differ.
            bits = jax.lax.optimization_barrier(jnp.asarray(value.view(f"u{value.itemsize}")))
            return jax.lax.bitcast_convert_type(bits, value.dtype)
    return jnp.asarray(value)


def _has_negative_zero(value: Any) -> bool:
    if value.dtype.kind == "c":
        return _has_negative_zero(np.real(value)) or _has_negative_zero(np.imag(value))
    return jnp.issubdtype(value.dtype, jnp.floating) and bool(np.any((value == 0) & np.signbit(value)))


def _array_to_bytes(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(-1)


def _array_from_bytes(data: jax.Array, dtype: torch.dtype, shape: tuple[int, ...]) -> jax.Array:
    wanted = numpy_dtype(dtype, "a residual")
    return jax.lax.bitcast_convert_type(data.reshape(*shape, wanted.itemsize), wanted)


_IN_JAX: Mapping[Any, Callable[..., Any]] = {
    to_bytes: _array_to_bytes,
    from_bytes: _array_from_bytes,
    materialized_tensor: materialized,
}


class Interpretation:
    """A graph as a JAX function of its inputs. Calls of it, and `jax.vmap` of it, need 64-bit types to be enabled."""

    def __init__(
        self,
        module: fx.GraphModule,
        name: str,
        seed: int | None,
        *,
        kernels: bool = False,
        blocks: str = "inline",
        islands_of: TracedFunction | None = None,
        choices_of: TracedFunction | None = None,
    ):
        self.module = module
        self._islands_of = islands_of  # the function, if torch may run nodes of its graph; otherwise None
        self._choices_of = choices_of  # the function, if torch may run nodes that have a lowering; otherwise None
        self._kernels = kernels  # whether to prefer kernels to lowerings
        self._name = name
        self._seed = seed  # the position of the input from which random operators draw
        known = folded(list(module.graph.nodes))
        self._nodes = needed_nodes(list(module.graph.nodes), known)
        self._constants = {node: _numpy_constant(value.detach()) for node, value in known.items()}
        for node in self._nodes:
            if node.op == "get_attr" and isinstance(value := getattr(module, str(node.target)), torch.Tensor):
                self._constants[node] = _numpy_constant(value.detach())
        self._scans = blocks == "scan"
        is_inline = blocks == "inline" or regions_of(module)
        self._steps = list(self._nodes) if is_inline else with_repetitions(self._nodes, self._constants)
        self._blocks = {
            position: Interpretation(
                graph_of_block(step), name, None, kernels=kernels, islands_of=islands_of, choices_of=choices_of
            )
            for position, step in enumerate(self._steps)
            if isinstance(step, Repetition)
        }
        self._last_uses = {} if self._blocks else _last_uses(self._steps, self._constants)

    def __call__(self, *arrays: Any) -> list[Any]:
        return self.run(arrays, self._keys(arrays))

    def run(self, arrays: Sequence[Any], keys: Keys) -> list[Any]:
        """Return the results of the graph. `keys` returns the key of a draw from its number."""
        values: dict[fx.Node, Any] = {}
        inputs = iter(arrays)
        for position, node in enumerate(self._steps):
            if isinstance(node, Repetition):
                run = self._blocks[position].run
                values.update(run_blocks(node, run, values, keys, scan=self._scans))
            elif node.op == "placeholder":
                values[node] = next(inputs)
            elif node in self._constants:
                values[node] = _constant_array(self._constants[node])
            elif node.op == "output":
                return list(map_arg(node.args[0], values.__getitem__))  # type: ignore[arg-type]
            else:
                values[node] = self._value(node, values, keys)
            for done in self._last_uses.get(position, ()):
                del values[done]
        raise AssertionError("a graph without an output")

    def _value(self, node: fx.Node, values: Mapping[fx.Node, Any], keys: Keys) -> Any:
        if node.op == "call_module":
            assert self._islands_of is not None
            with jax.named_scope(_scope(node)):
                return bind_region(node, self._islands_of, values)
        if not isinstance(node.target, OpOverload):
            args = map_arg(node.args, values.__getitem__)
            kwargs = map_arg(node.kwargs, values.__getitem__)
            return _IN_JAX.get(node.target, node.target)(*args, **kwargs)  # type: ignore[operator]
        reason = self._island_reason(node)
        workload = workload_for_torch(node) if self._choices_of is not None and reason is None else None
        with jax.named_scope(_scope(node)):
            if reason is not None:
                return self._island(node, values, reason)
            try:
                if workload is None:
                    return self._lowered(node, values, keys)
                assert self._choices_of is not None
                by_xla = functools.partial(self._lowered, node, keys=_no_keys)  # it draws nothing
                return bind_choice(node, self._choices_of, values, workload, by_xla)
            except TranslationError as error:
                if self._islands_of is None or ineligible_reason(node) is not None:
                    raise
                return self._island(node, values, f"{describe_node(node)} cannot be translated here: {error}")

    def _lowered(self, node: fx.Node, values: Mapping[fx.Node, Any], keys: Keys) -> Any:
        """Return the value of an operator by its lowering, or by the lowerings of its decomposition."""
        args = map_arg(node.args, values.__getitem__)
        kwargs = map_arg(node.kwargs, values.__getitem__)
        key = keys(origin(node).get("draw", (0,)))
        lowering = find(node.target)  # type: ignore[arg-type]
        try:
            kernel = find_kernel(node.target) if self._kernels else None  # type: ignore[arg-type]
            value = NotImplemented if kernel is None else kernel(*args, node=node, key=key, **kwargs)
            if value is not NotImplemented:
                pass
            elif lowering is None:
                value = self._decomposed(node, values, keys)
            else:
                value = lowering(*args, node=node, key=key, **kwargs)
        except (TranslationError, LoweringError):
            raise
        except Exception as error:
            raise_if_from_signal(error)
            if "jax_shapes" in node.meta:  # symbolic sizes: the error's text would be about JAX's inner program
                raise TranslationError(
                    f"`{self._name}`: the lowering of {describe_node(node)} does not take these symbolic sizes. Give "
                    "the size as a number, or write the operator in another way."
                ) from error
            raise _failure_class(lowering)(
                f"`{self._name}`: the lowering of {describe_node(node)} failed: {type(error).__name__}: {error}"
            ) from error
        _check_value(node, value, _failure_class(lowering))
        return value

    def _island_reason(self, node: fx.Node) -> str | None:
        """Return why torch runs a node; None if it does not."""
        if self._islands_of is None:
            return None
        if not is_known(node):
            return without_lowering(node)
        return "a test asks for it" if is_forced(node) else None

    def _island(self, node: fx.Node, values: Mapping[fx.Node, Any], reason: str) -> Any:
        """Return the value of a node that torch runs."""
        assert self._islands_of is not None
        value = bind_island(node, self._islands_of, values, reason)
        _check_value(node, value)
        return value

    def _decomposed(self, node: fx.Node, values: Mapping[fx.Node, Any], keys: Keys) -> Any:
        """Return the value of a node by interpreting torch's decomposition of its operator."""
        module = decomposition(node)
        reason = missing_lowering_reason(module)
        if reason is not None:
            raise TranslationError(f"`{self._name}`: in the decomposition of {describe_node(node)}, {reason}")
        arrays = [values[x] for x in tensor_inputs(node)]
        run = self._runner(module, keys)
        if has_batching_rule(node.target):  # type: ignore[arg-type]
            run = self._with_own_rule(node, run, keys)
        results = run(*arrays)
        return results[0] if isinstance(node.meta["val"], torch.Tensor) else tuple(results)

    def _runner(self, module: fx.GraphModule, keys: Keys) -> Callable[..., list[Any]]:
        inner = Interpretation(module, self._name, None, kernels=self._kernels)
        return lambda *arrays: inner.run(arrays, keys)

    def _with_own_rule(self, node: fx.Node, run: Callable[..., list[Any]], keys: Keys) -> Callable[..., list[Any]]:
        """Return `run`, the function of a node, with the batching rule of the node's operator."""
        one = custom_vmap(run)

        @one.def_vmap
        def over_batch(size: int, batched: Sequence[bool], *arrays: Any) -> tuple[list[Any], list[bool]]:
            module = batched_decomposition(node, size, batched)
            reason = missing_lowering_reason(module)
            if reason is not None:
                raise TranslationError(f"`{self._name}`: in the batching rule of {describe_node(node)}, {reason}")
            results = self._runner(module, keys)(*arrays)
            return results, [True] * len(results)

        return one

    def _keys(self, arrays: Sequence[Any]) -> Keys:
        def of_draw(draw: Sequence[int]) -> Callable[[], jax.Array]:
            def key() -> jax.Array:
                if self._seed is None:
                    raise TranslationError(f"`{self._name}` draws random numbers here, but has no key.")
                found = jax.random.wrap_key_data(arrays[self._seed], impl="threefry2x32")
                for number in draw:
                    found = jax.random.fold_in(found, number)
                return found

            return key

        return of_draw


def _no_keys(draw: Sequence[int]) -> Callable[[], jax.Array]:
    def key() -> jax.Array:
        raise TranslationError(f"the draw {draw} has no key")

    return key


def _scope(node: fx.Node) -> str:
    """Return the named scope of a node: module path and operator, inside ``transpose(...)`` for a backward operator."""
    notes = origin(node)
    name = str(node.target).removeprefix("aten.").removesuffix(".default")
    path = notes.get("module", "").replace(".", "/")
    path = f"transpose({path})" if notes.get("backward") else path
    return f"{path}/{name}" if path else name


def _failure_class(lowering: Lowering | None) -> type[TranslationError | LoweringError]:
    """Return the exception class for a failed lowering. If the lowering is jtbridge's, torch may run the operator."""
    return TranslationError if lowering is None or lowering.is_own else LoweringError


def _check_value(node: fx.Node, value: Any, error: type[TranslationError | LoweringError] = TranslationError) -> None:
    """Raise unless a node's value has the shapes and dtypes that torch gave the node."""
    got, expected = _flat(value), _flat(node.meta.get("val"))
    if len(got) != len(expected):
        raise error(f"the lowering of {describe_node(node)} gave {len(got)} results where torch has {len(expected)}")
    for array, tensor in zip(got, expected, strict=True):
        if not isinstance(tensor, torch.Tensor) or (array is None and error is TranslationError):
            continue
        shape, dtype = tuple(tensor.shape), numpy_dtype(tensor.dtype, "a result")
        if array is None or not hasattr(array, "dtype"):
            raise error(
                f"the lowering of {describe_node(node)} gave {kind_of(array)} where torch has {dtype}{list(shape)}"
            )
        if not _same_shape(jnp.shape(array), shape) or array.dtype != dtype:
            raise error(
                f"the lowering of {describe_node(node)} gave {array.dtype}{list(jnp.shape(array))} where torch has "
                f"{dtype}{list(shape)}"
            )


def _same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether two shapes agree. Symbolic sizes of torch and JAX are not compared."""
    return len(a) == len(b) and all(
        x == y for x, y in zip(a, b, strict=True) if isinstance(x, int) and isinstance(y, int)
    )


def _flat(value: Any) -> list[Any]:
    return [x for part in value for x in _flat(part)] if isinstance(value, list | tuple) else [value]


def _last_uses(nodes: Sequence[Any], known: Mapping[fx.Node, Any]) -> dict[int, list[fx.Node]]:
    """Return, by position, the nodes whose values are used there for the last time. Nodes in `known` use no values."""
    last: dict[fx.Node, int] = {}
    for position, node in enumerate(nodes):
        if node in known:
            continue
        for used in node.all_input_nodes:
            last[used] = position
    found: dict[int, list[fx.Node]] = {}
    for node, position in last.items():
        if nodes[position].op != "output":
            found.setdefault(position, []).append(node)
    return found
