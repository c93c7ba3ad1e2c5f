"""The primitives that run the function of an eager call.

- ``eager_call[f](x...) -> y...``: run the function
- ``eager_forward[f](x...) -> y..., token``: run the function, and keep the graph that autograd records

``f`` is an `EagerFunction` or a transformation of one. Their derivatives are the primitives of `_derivatives.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import ad, batching, mlir

from jtbridge._compat import Context, add_linearization, current_context
from jtbridge.core.functions import TorchFunction
from jtbridge.core.primitive_rules import (
    batch_first,
    batch_size,
    nonzero_inputs,
    primitive_of_several_results,
    to_front,
    zero_tangents,
)

from ._common import (
    bound_in_program,
    is_symbolic_zero,
    lower_as,
    result_avals,
    run,
    run_recorded,
    token_aval,
)
from ._derivatives import eager_tangents, linearized
from ._function import EagerVmap, as_captured
from ._graph import token_for

eager_call_p = primitive_of_several_results("eager_call")
eager_forward_p = primitive_of_several_results("eager_forward")


# --- eager_call ---------------------------------------------------------------------------------------------------


def _call_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, fn: TorchFunction) -> Any:
    wrt = nonzero_inputs(fn.in_types, [not is_symbolic_zero(t) for t in tangents])
    if not wrt:
        results = eager_call_p.bind(*primals, fn=fn)
        return results, zero_tangents(results)
    *results, token = eager_forward_p.bind(*primals, fn=fn, wrt=wrt, batch=())
    return results, eager_tangents(fn, results, primals, tangents, token, wrt)


def _call_linearize(is_vjp: bool, nonzeros: Sequence[bool], *primals: Any, fn: TorchFunction) -> Any:
    del is_vjp
    wrt = nonzero_inputs(fn.in_types, nonzeros)
    if not wrt:
        results = eager_call_p.bind(*primals, fn=fn)
        zeros = zero_tangents(results)
        return results, [False] * len(results), (), lambda _, *tangents: zeros
    *results, token = eager_forward_p.bind(*primals, fn=fn, wrt=wrt, batch=())
    return linearized(fn, wrt, results, token, primals, wrt)


def _call_batch(args: Sequence[Any], dims: Sequence[Any], *, fn: TorchFunction) -> Any:
    size = batch_size(args, dims)
    args, dims = batch_first(args, dims)
    results = eager_call_p.bind(*args, fn=EagerVmap(fn, dims, size))
    return results, [0] * len(results)


eager_call_p.def_impl(lambda *args, fn: run(fn, args))
eager_call_p.def_abstract_eval(lambda *avals, fn: result_avals(as_captured(fn), avals))
mlir.register_lowering(eager_call_p, lower_as(lambda *args, fn: bound_in_program(fn, args)))
ad.primitive_jvps[eager_call_p] = _call_jvp
add_linearization(eager_call_p, _call_linearize)
batching.primitive_batchers[eager_call_p] = _call_batch


# --- eager_forward ------------------------------------------------------------------------------------------------


def _forward_impl(*args: Any, fn: TorchFunction, wrt: tuple[int, ...], batch: tuple[int, ...]) -> list[jax.Array]:
    results, graph = run_recorded(fn, args, wrt)
    return [*results, token_for(graph, batch)]


# One graph serves both derivatives, so the run records the inputs `wrt` and the inputs with a nonzero tangent.
def _forward_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, fn: TorchFunction, wrt: Any, batch: Any) -> Any:
    also = nonzero_inputs(fn.in_types, [not is_symbolic_zero(t) for t in tangents])
    wrt = tuple(sorted({*wrt, *also}))
    *results, token = eager_forward_p.bind(*primals, fn=fn, wrt=wrt, batch=batch)
    return [*results, token], eager_tangents(fn, results, primals, tangents, token, wrt) + zero_tangents([token])


def _forward_linearize(
    is_vjp: bool, nonzeros: Sequence[bool], *primals: Any, fn: TorchFunction, wrt: Any, batch: Any
) -> Any:
    del is_vjp
    also = nonzero_inputs(fn.in_types, nonzeros)
    wrt = tuple(sorted({*wrt, *also}))
    *results, token = eager_forward_p.bind(*primals, fn=fn, wrt=wrt, batch=batch)
    _, nonzero_outs, residuals, apply = linearized(fn, also, results, token, primals, wrt)
    zero = zero_tangents([token])
    return [*results, token], [*nonzero_outs, False], residuals, lambda saved, *ts: [*apply(saved, *ts), *zero]


# Each row of a differentiated input has its own gradient, so every differentiated input gets the batch axis: from JAX
# if an outer transformation must see the axis, otherwise from torch, which is faster (:func:`run_recorded`).
def _forward_batch(args: Sequence[Any], dims: Sequence[Any], *, fn: TorchFunction, wrt: Any, batch: Any) -> Any:
    size = batch_size(args, dims)
    args, dims = batch_first(args, dims)
    if current_context() is not Context.EAGER:
        args = [to_front(x, d, size) if i in wrt else x for i, (x, d) in enumerate(zip(args, dims, strict=True))]
    dims = tuple(0 if i in wrt else d for i, d in enumerate(dims))
    results = eager_forward_p.bind(*args, fn=EagerVmap(fn, dims, size), wrt=wrt, batch=(size, *batch))
    return results, [0] * len(results)


eager_forward_p.def_impl(_forward_impl)
eager_forward_p.def_abstract_eval(
    lambda *avals, fn, wrt, batch: [*result_avals(as_captured(fn), avals), token_aval(batch, avals)]
)
mlir.register_lowering(
    eager_forward_p,
    lower_as(lambda *args, fn, wrt, batch: [*bound_in_program(fn, args), jax.numpy.zeros((*batch, 0), np.uint8)]),
)
ad.primitive_jvps[eager_forward_p] = _forward_jvp
add_linearization(eager_forward_p, _forward_linearize)
batching.primitive_batchers[eager_forward_p] = _forward_batch
