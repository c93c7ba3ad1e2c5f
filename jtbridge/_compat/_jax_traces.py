"""The context of a call in JAX: eager, inside a transformation of an eager call, or inside a traced program.

JAX has no public query for this context. Tried on jax 0.10.2.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from typing import Any

from jax._src import core
from jax._src.interpreters import ad, batching, partial_eval


class Context(enum.Enum):
    """How JAX runs a call."""

    EAGER = "eager"  # concrete arrays, no transformation
    TRANSFORMED = "transformed"  # concrete arrays behind the tracers of grad, jvp or vmap
    STAGED = "staged"  # inside jit, scan, cond, shard_map, ...: the operations become part of a program


_TRANSFORMATIONS = (ad.JVPTrace, ad.LinearizeTrace, batching.BatchTrace)


def current_context() -> Context:
    """Return how JAX runs a call that is made now on this thread."""
    trace = core.trace_ctx.trace
    if isinstance(trace, core.EvalTrace):
        return Context.EAGER
    while isinstance(trace, _TRANSFORMATIONS):
        trace = trace.parent_trace
    return Context.TRANSFORMED if isinstance(trace, core.EvalTrace) else Context.STAGED


def without_axis_names() -> contextlib.AbstractContextManager[None]:
    """Return a context for a call on values, in which the axis names of enclosing ``jax.vmap(axis_name=)`` are unknown.

    Otherwise a program that uses such a name would be traced, and then fail by an assertion of JAX.
    """
    if core.trace_ctx.axis_env is core.top_axis_env:
        return contextlib.nullcontext()
    return _no_axis_names()


@contextlib.contextmanager
def _no_axis_names() -> Iterator[None]:
    outer = core.trace_ctx.axis_env
    core.trace_ctx.set_axis_env(core.top_axis_env)
    try:
        yield
    finally:
        core.trace_ctx.set_axis_env(outer)


def concrete_values(x: Any) -> list[Any]:
    """Return the arrays that an argument has behind the tracers of grad, jvp and vmap; none inside a traced program."""
    if isinstance(x, batching.BatchTracer):
        return concrete_values(x.val)
    if isinstance(x, ad.JVPTracer):
        return [*concrete_values(x.primal), *concrete_values(x.tangent)]
    if isinstance(x, ad.LinearizeTracer):
        return concrete_values(x.primal)
    return [] if isinstance(x, core.Tracer | ad.Zero) else [x]


def current_trace() -> Any:
    """Return the innermost trace that is active on this thread, for a comparison with `is`."""
    return core.trace_ctx.trace


def traced_for(trace: Any) -> str:
    """Return the name of the transformation that a trace to a jaxpr is for, such as "jit" or "scan"."""
    return getattr(getattr(getattr(trace, "frame", None), "debug_info", None), "traced_for", "")


def outermost_trace() -> Any:
    """Return the outermost trace to a jaxpr that is active on this thread; None if nothing is being traced.

    The trace supports weak references, and is freed when tracing ends.
    """
    trace, found = core.trace_ctx.trace, None
    while trace is not None and not isinstance(trace, core.EvalTrace):
        if isinstance(trace, partial_eval.DynamicJaxprTrace):
            found = trace
        trace = getattr(trace, "parent_trace", None)
    return found


class _RefusingTrace(core.Trace):
    def __init__(self, error: Callable[[str], Exception]):
        super().__init__()
        self.error = error

    def stage_value(self, val: Any) -> Any:
        raise self.error("asarray")

    def _refuse(self, primitive: Any, *args: Any, **params: Any) -> Any:
        raise self.error(str(primitive))

    process_call = process_custom_jvp_call = process_custom_vjp_call = _refuse

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        raise self.error(str(params.get("name", primitive)))


def refusing_jax(error: Callable[[str], Exception], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `call`, and raises if `call` uses an operation of JAX on the same thread.

    Args:
        error: returns the exception for the name of an operation, or of a jitted function.
        call: the function to run.
    """
    refusing = _RefusingTrace(error)

    def run(*args: Any) -> Any:
        before = core.trace_ctx.trace
        core.trace_ctx.set_trace(refusing)
        try:
            return call(*args)
        finally:
            core.trace_ctx.set_trace(before)

    return run
