"""Where in JAX a function is called: eagerly, inside a transformation of an eager call, or inside a traced program.

JAX has no public query for it. Tried on jax 0.10.2.
"""

from __future__ import annotations

import enum
from typing import Any

from jax._src import core
from jax._src.interpreters import ad, batching, partial_eval


class Context(enum.Enum):
    """How JAX runs what is called now."""

    EAGER = "eager"  # concrete arrays, no transformation
    TRANSFORMED = "transformed"  # concrete arrays behind the tracers of grad, jvp or vmap
    STAGED = "staged"  # inside jit, scan, cond, shard_map, ...: the operations become part of a program


_TRANSFORMATIONS = (ad.JVPTrace, ad.LinearizeTrace, batching.BatchTrace)


def current_context() -> Context:
    """How JAX runs what is called now on this thread."""
    trace = core.trace_ctx.trace
    if isinstance(trace, core.EvalTrace):
        return Context.EAGER
    while isinstance(trace, _TRANSFORMATIONS):
        trace = trace.parent_trace
    return Context.TRANSFORMED if isinstance(trace, core.EvalTrace) else Context.STAGED


def outermost_trace() -> Any:
    """The outermost trace to a jaxpr that is under way on this thread; None if nothing is being traced.

    It can be referred to weakly, and is gone when the trace is over.
    """
    trace, found = core.trace_ctx.trace, None
    while trace is not None and not isinstance(trace, core.EvalTrace):
        if isinstance(trace, partial_eval.DynamicJaxprTrace):
            found = trace
        trace = getattr(trace, "parent_trace", None)
    return found
