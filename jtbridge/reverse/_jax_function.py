"""JAX functions of flat arrays under a handle, and the functions derived from them.

A handle (`jtbridge/core/jax_calls.py`) contains a random number, so a graph of another process cannot find a wrong
function.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import uuid
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import jaxpr_as_fun

from jtbridge._compat import (
    Context,
    current_context,
    has_custom_vjp,
    outside_functorch,
    outside_traces,
    with_autograd,
    without_axis_names,
    without_unused,
)
from jtbridge.core.backend_names import WITHOUT_KERNELS
from jtbridge.core.dtypes import is_differentiable, numpy_dtype, torch_dtype
from jtbridge.core.fork import check_not_forked
from jtbridge.core.jax_calls import HANDLES
from jtbridge.core.nested_calls import is_in_callback
from jtbridge.core.positions import of_differentiated, replaced
from jtbridge.errors import JaxCallError

from ._reads import TensorReads
from ._tensors import common_device, jax_device, to_operands, to_tensors

Types = tuple[tuple[tuple[int, ...], np.dtype], ...]  # shapes and dtypes of flat arrays
Arrays = Sequence[jax.Array]
Value = TypeVar("Value")
Derived = TypeVar("Derived", bound="JaxFunction")

_LOCK = threading.RLock()
_MAX_PROGRAMS = 4  # programs that are kept for each signature, for calls under torch.func
_MAX_TYPES = 256  # signatures of one function whose records are kept


def find_function(handle: str) -> JaxFunction:
    """Return the JAX function with a handle.

    Raises:
        JaxCallError: the function was deleted, or it is one of another process.
    """
    found = HANDLES.get(handle)
    if found is None:
        raise JaxCallError(
            f"A graph calls the JAX function `{handle.partition('#')[0]}`, which does not exist in this process (any "
            "more). A graph refers to a JAX function and does not contain it: keep a reference to the function that "
            "`to_torch_function` returned as long as the graph is used, and trace the graph again in a new process."
        )
    return found


class JaxFunction:
    """A JAX function of flat arrays to a list of flat arrays, compiled once for each signature.

    Args:
        name: the name of the user's function.
        function: the function, which JAX traces.
        x64: whether 64-bit types are enabled while it is traced and run.

    Attributes:
        handle: the text by which the torch operator finds the function.
        jitted: the function under `jax.jit`. Derivatives and batches are derived from it, so they use the trace that
            computed the values, even if closed-over values have changed since.
        has_own_gradient: whether it is known that a `jax.custom_vjp` is part of the function.
        reads: the torch tensors that the function reads while JAX traces it.
    """

    def __init__(self, name: str, function: Callable[..., list[Any]], x64: bool):
        self.name = name
        self.function = function
        self.x64 = x64
        self.has_own_gradient = False
        self.reads = TensorReads()
        self.handle = f"{name}#{uuid.uuid4().hex}"
        self.jitted = jax.jit(function)
        self._derived: dict[Hashable, JaxFunction] = {}
        self._types: dict[Types, Types] = {}
        self._used: dict[Any, list[bool]] = {}
        # By types of arguments: the latest programs, one for each of JAX's settings, and the function of each program.
        self._latest: dict[Types, tuple[tuple[Any, JaxFunction], ...]] = {}
        HANDLES[self.handle] = self

    def __call__(self, *arrays: Any) -> list[jax.Array]:
        """Return the results for arrays, or for tracers: then the function becomes part of the program."""
        with self._in_jax():
            return self._run_jitted(arrays)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results for tensors, in memory that nothing else refers to.

        Raises:
            JaxCallError: XLA called the code that calls this function.
            ForkError: the process was forked from one that uses JAX.
        """
        check_not_forked(self.name)
        if is_in_callback():
            raise JaxCallError(
                f"`{self.name}`, a JAX function, is called by a torch function that a JAX program calls. JAX cannot "
                "run inside a callback of a program: the call could wait forever. Let the torch function be translated "
                f'(`jtbridge.wrap(f, backend="{WITHOUT_KERNELS}")` says what prevents it), or call `f` outside of '
                "`jax.jit`."
            )
        device = common_device(tensors, self.name)
        target = jax_device(device, self.name)
        operands = to_operands(tensors, target)
        with self._settings(jax.default_device(target) if not tensors else None):
            try:
                with without_axis_names():
                    results = self._run_jitted(operands)
            except jax.errors.UnexpectedTracerError as error:
                raise _closed_over_tracer(self.name) from error
            if any(isinstance(result, jax.core.Tracer) for result in results):
                raise _closed_over_tracer(self.name)
            if device.type == "cpu":
                results = [result.block_until_ready() for result in results]
        return to_tensors(results, device)

    def _run_jitted(self, operands: Sequence[Any]) -> list[jax.Array]:
        try:
            return self.jitted(*operands)
        except NameError as error:
            _refuse_axis_name(self.name, error)
            raise

    def result_types(self, types: Types) -> Types:
        """Return the shapes and dtypes of the results for arguments of some types."""
        return _cached(self._types, types, lambda: types_of(self._trace(types).out_info))

    def used_arguments(self, types: Types, count: int) -> list[bool]:
        """Return which arguments of some types the first `count` results are computed from."""
        return _cached(self._used, (types, count), lambda: self._find_used(types, count))

    def _find_used(self, types: Types, count: int) -> list[bool]:
        program = self._program(types)
        results = [i < count for i in range(len(program.jaxpr.outvars))]
        return without_unused(program, results, [False] * len(types))[1]

    def as_traced(self, tensors: Sequence[torch.Tensor]) -> Callable[..., list[Any]]:
        """Return the function as the program that JAX traces now for arguments like `tensors`.

        Other arguments are traced when the result is called. A graph calls it when the graph is lowered, and the values
        that the function closes over may have changed by then.
        """
        types = tensor_types(tensors)
        program = self.traced_program(types)

        def run(*arrays: Any) -> list[Any]:
            if types_of(arrays) != types:
                return self(*arrays)
            with self._in_jax():
                return program(*arrays)

        return run

    def traced_program(self, types: Types) -> Callable[..., list[Any]]:
        """Return the program that JAX traces now, as a function of arguments of exactly these types."""
        return jaxpr_as_fun(self._program(types))

    def as_of_now(self, types: Types) -> JaxFunction:
        """Return the program that JAX traces now, as a `JaxFunction` of arguments of exactly these types.

        It and its derivatives stay the same if the values that the function closes over change later.
        """
        program = self._program(types)
        latest = self._latest.get(types, ())
        for known, function in latest:
            if known is program:
                return function
        made = JaxFunction(self.name, jaxpr_as_fun(program), self.x64)
        made.has_own_gradient = has_custom_vjp(program.jaxpr)
        made.reads = self.reads
        store_entry(self._latest, types, ((program, made), *latest[: _MAX_PROGRAMS - 1]))
        return made

    def _program(self, types: Types) -> Any:
        return self._trace(types).jaxpr

    def _trace(self, types: Types) -> Any:
        """Trace the function for arguments of some types.

        Raises:
            JaxCallError: the function closes over an array that JAX traces, or uses the name of an axis.
        """
        with outside_functorch(), self._in_jax():  # the function may call torch, by `jtbridge.wrap`
            try:
                traced = self.jitted.trace(*_structs(types))
            except NameError as error:
                _refuse_axis_name(self.name, error)
                raise
        if len(traced.jaxpr.in_avals) != len(types):  # JAX passes closed-over tracers as further arguments
            raise _closed_over_tracer(self.name)
        return traced

    def vjp(self, wrt: tuple[int, ...], outs: tuple[int, ...]) -> JaxFunction:
        """Return the function ``(*arguments, *cotangents of outs) -> gradients of wrt``, in torch's convention."""
        return self._derive(("vjp", wrt, outs), lambda: _vjp_function(self, wrt, outs))

    def jvp(self, wrt: tuple[int, ...], outs: tuple[int, ...]) -> JaxFunction:
        """Return the function ``(*arguments, *tangents of wrt) -> tangents of outs``."""
        return self._derive(("jvp", wrt, outs), lambda: _jvp_function(self, wrt, outs))

    def under_gradient(self, wrt: tuple[int, ...]) -> JaxFunction:
        """Return the function as a gradient by `wrt` runs it: a `jax.custom_vjp` runs its forward rule.

        Unlike a `jax.custom_vjp` itself, this rule has a forward mode, which second derivatives use.
        """
        return self._derive(("under gradient", wrt), lambda: _under_gradient(self, wrt))

    def batch(self, dims: tuple[int | None, ...]) -> JaxFunction:
        """Return the function of batches; the dims are 0 or None, and results have their batch axis first."""
        return self._derive(("batch", dims), lambda: jax.vmap(self.jitted, in_axes=dims))

    def derive(self, key: Hashable, make: Callable[[], Derived]) -> Derived:
        """Return the function that is stored for a key; call `make` to make it the first time."""
        found: Any = self._derived.get(key)
        if found is None:
            with _LOCK:
                found = self._derived.get(key)
                if found is None:
                    found = self._derived[key] = make()
        return found

    def _derive(self, key: Hashable, make: Callable[[], Callable[..., list[Any]]]) -> JaxFunction:
        return self.derive(key, lambda: JaxFunction(self.name, make(), self.x64))

    def _settings(self, device: contextlib.AbstractContextManager | None) -> contextlib.AbstractContextManager:
        """Return the context of a run on concrete arrays."""
        # Whether a JAX trace encloses this run, although its arguments are concrete.
        traces = current_context() is not Context.EAGER
        if device is None and not traces:
            return self._in_jax()
        stack = contextlib.ExitStack()
        stack.enter_context(self._in_jax())
        stack.enter_context(jax.ensure_compile_time_eval() if traces else contextlib.nullcontext())
        stack.enter_context(device or contextlib.nullcontext())
        return stack

    def _in_jax(self) -> contextlib.AbstractContextManager:
        """Return the context in which JAX traces or runs the function: its x64 setting, autograd on, no torch trace."""
        traces = outside_traces()
        if jax.config.jax_enable_x64 == self.x64 and isinstance(traces, contextlib.nullcontext):  # type: ignore[attr-defined]
            return with_autograd()
        stack = contextlib.ExitStack()
        stack.enter_context(traces)
        stack.enter_context(with_autograd())
        stack.enter_context(jax.enable_x64(self.x64))
        return stack


@functools.lru_cache(_MAX_TYPES)
def _structs(types: Types) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]


def _refuse_axis_name(name: str, error: NameError) -> None:
    if "unbound axis name" in str(error):
        raise JaxCallError(
            f"`{name}`, a JAX function that torch code calls, uses the name of an axis ({error}). Axis names, such "
            "as of `jax.vmap(..., axis_name=)`, are not known in torch code. Compute the sum or mean over the axis in "
            "JAX, before or after the torch function."
        ) from error


def _closed_over_tracer(name: str) -> JaxCallError:
    return JaxCallError(
        f"`{name}`, a JAX function that torch code calls, closes over an array that JAX traces: an argument of an "
        "enclosing `jax.jit`, `jax.grad` or `jax.vmap`, which torch does not see. Pass the array to the torch function "
        f"as an argument, and from there to `{name}`."
    )


def _cached(table: dict[Any, Value], key: Any, make: Callable[[], Value]) -> Value:
    """Return the entry of a cache for a key. Make it if it is missing; `store_entry` then drops the oldest entries."""
    found = table.get(key)
    if found is None:
        found = make()
        store_entry(table, key, found)
    return found


def store_entry(table: dict[Any, Value], key: Any, value: Value) -> None:
    """Set an entry of a table, and drop the oldest one if the table is full."""
    with _LOCK:
        if len(table) >= _MAX_TYPES and key not in table:
            del table[next(iter(table))]
        table[key] = value


def types_of(values: Sequence[Any]) -> Types:
    """Return the shapes and dtypes of arrays or tracers."""
    return tuple((tuple(x.shape), x.dtype) for x in values)


def tensor_types(tensors: Sequence[torch.Tensor]) -> Types:
    """Return the shapes and dtypes of tensors. Symbolic sizes of a graph become constants of the graph."""
    return tuple((tuple(map(int, x.shape)), numpy_dtype(x.dtype, "an argument")) for x in tensors)


def is_inexact(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def in_own_memory(values: Sequence[Any]) -> list[Any]:
    """Return copies of the results of a program, so that each result has its own memory.

    JAX returns an argument or a closed-over array as it is, and torch may write to a result. XLA removes a copy that is
    not needed.
    """
    return [jnp.copy(value) for value in values]


def conj_if_complex(value: Any) -> Any:
    return jnp.conj(value) if jnp.iscomplexobj(value) else value


# Torch's gradient of a complex argument is the conjugate of JAX's: both are the transpose of the same linear map,
# torch's for the product <a, b> = conj(a) b and JAX's for a b. So torch's pullback is JAX's, conjugated before and
# after.
def _vjp_function(base: JaxFunction, wrt: tuple[int, ...], outs: tuple[int, ...]) -> Callable[..., list[Any]]:
    def gradients(*arrays: Any) -> list[Any]:
        count = len(arrays) - len(outs)
        arguments, cotangents = arrays[:count], arrays[count:]
        _, pull = jax.vjp(of_differentiated(base.jitted, wrt, outs, arguments), *[arguments[i] for i in wrt])
        return in_own_memory([conj_if_complex(x) for x in pull(tuple(map(conj_if_complex, cotangents)))])

    return gradients


def _under_gradient(base: JaxFunction, wrt: tuple[int, ...]) -> Callable[..., list[Any]]:
    def primal(*arrays: Any) -> list[Any]:
        def of(*active: Any) -> tuple[list[Any], list[Any]]:
            results = base.jitted(*replaced(arrays, wrt, active))
            return [results[i] for i in inexact_positions(types_of(results))], results

        found, _, results = jax.vjp(of, *[arrays[i] for i in wrt], has_aux=True)
        return in_own_memory(replaced(results, inexact_positions(types_of(results)), found))

    return primal


def _jvp_function(base: JaxFunction, wrt: tuple[int, ...], outs: tuple[int, ...]) -> Callable[..., list[Any]]:
    def tangents(*arrays: Any) -> list[Any]:
        count = len(arrays) - len(wrt)
        arguments, given = arrays[:count], arrays[count:]
        of_wrt = of_differentiated(base.jitted, wrt, outs, arguments)
        _, found = jax.jvp(of_wrt, [arguments[i] for i in wrt], list(given))
        return in_own_memory(found)

    return tangents


def inexact_positions(types: Types) -> tuple[int, ...]:
    """Return the positions of the arrays that have derivatives."""
    return tuple(i for i, (_, dtype) in enumerate(types) if is_differentiable(dtype))


def empty_results(types: Types, device: torch.device) -> list[torch.Tensor]:
    """Return tensors of some types without values."""
    return [torch.empty(shape, dtype=torch_dtype(dtype, "a result"), device=device) for shape, dtype in types]
