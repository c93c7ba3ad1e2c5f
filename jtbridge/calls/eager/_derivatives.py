"""The primitives of the derivatives of an eager call, on the graph that torch's autograd recorded of it.

- ``eager_linear[f](x..., token, dx...) -> dy...``: Df(x) dx, by differentiating the pullback of the kept graph
- ``eager_pullback[f](x..., token, ct...) -> g..., token``: ct @ Df(x) by the kept graph, and the graph of the gradient

``f`` is an `EagerFunction` or a transformation of one. Under vmap a token gets a leading axis for each level of
batching that its graph has. `levels` has an entry for each level of a batched `eager_linear` or `eager_pullback`:
"graph" if the graph has the level, or "extra" if the level is a batch of tangents or cotangents over one graph.
`spread` holds the positions of the x that have every level in the graph, as every differentiated input does, because
each row has its own gradient. Such an x without a batch axis gets one, so that its shape is the shape in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.interpreters import ad, batching, mlir

from jtbridge._compat import Context, add_linearization, current_context, run_outside_transforms
from jtbridge.core.functions import TorchFunction
from jtbridge.core.messages import text_of
from jtbridge.core.positions import replaced
from jtbridge.core.primitive_rules import (
    batch_first,
    batch_size,
    differentiable,
    nonzero_inputs,
    primitive_of_several_results,
    sharded_like,
    tangents_by,
    to_front,
    zero_tangents,
)
from jtbridge.errors import DifferentiationError, RandomnessError
from jtbridge.transforms import (
    SMALL,
    DetachedBackwardError,
    Vjp,
    have_nan,
    may_be_nonlinear,
    of_results,
    refuse_nonlinear,
    without_nan,
)

from ._arrays import Placement, copied_tensor
from ._common import (
    as_arrays,
    bound_in_program,
    escapes_vmap,
    is_batched,
    is_symbolic_zero,
    lower_as,
    result_avals,
    results_to_jax,
    run,
    run_recorded,
    token_aval,
)
from ._function import EagerJvp, EagerVmap
from ._graph import (
    AutogradGraph,
    eager_function,
    graph_in,
    innermost_vjp,
    recording,
    refuse_error_node,
    token_for,
    with_axes,
)
from ._rows import product_by_rows

eager_linear_p = primitive_of_several_results("eager_linear")
eager_pullback_p = primitive_of_several_results("eager_pullback")

NO_TOKEN = np.empty((0,), np.uint8)


# --- eager_linear -------------------------------------------------------------------------------------------------


def _eager_differential(
    fn: TorchFunction, wrt: Any, args: Sequence[Any], token: Any, tangents: Sequence[Any], spread: tuple[int, ...]
) -> list[Any]:
    outs = differentiable(fn.out_types)
    return eager_linear_p.bind(
        *args,
        token,
        *tangents,
        forward=EagerJvp(fn, wrt, outs),
        transpose=Vjp(fn, wrt, outs),
        levels=(),
        spread=spread,
    )


def eager_tangents(
    fn: TorchFunction,
    results: Sequence[Any],
    args: Sequence[Any],
    tangents: Sequence[Any],
    token: Any,
    spread: tuple[int, ...] = (),
) -> list[Any]:
    """Return the tangents of all results: symbolic zeros for results that are neither float nor complex."""
    return tangents_by(
        lambda wrt, given: _eager_differential(fn, wrt, args, token, given, spread), fn, results, tangents
    )


def linearized(
    fn: TorchFunction,
    wrt: Any,
    results: Sequence[Any],
    token: Any,
    primals: Sequence[Any],
    spread: tuple[int, ...],
) -> Any:
    """Return the value of a linearization rule for ``y = f(x)``. The residuals are the arguments and the token."""
    zeros = zero_tangents(results)
    outs = differentiable(fn.out_types)
    if not wrt or not outs:
        return results, [False] * len(results), (), lambda _, *tangents: zeros
    count = len(primals)

    def apply(saved: Sequence[Any], *tangents: Any) -> list[Any]:
        given = [tangents[i] for i in wrt]
        return replaced(zeros, outs, _eager_differential(fn, wrt, saved[:count], saved[count], given, spread))

    return results, [o in outs for o in range(len(results))], [*primals, token], apply


def _extra_axes(levels: Sequence[str]) -> list[int]:
    return [axis for axis, level in enumerate(levels) if level == "extra"]


# Df(x) dx is the vector-Jacobian product of v -> v @ Df(x) with dx. That map is linear in v, so the product may be
# taken at any v. At v = 1 torch's formulas have a value; at v = 0 the formula of logcumsumexp gives NaN.
def _linear_impl(
    *args: Any, forward: Any, transpose: Any, levels: tuple[str, ...], spread: tuple[int, ...]
) -> list[jax.Array]:
    del spread
    count = _inputs_of(transpose, forward)
    arrays = as_arrays(args)
    graph = graph_in(arrays[count])
    if graph is None:
        return run(forward, [*arrays[:count], *arrays[count + 1 :]])
    of = innermost_vjp(transpose)
    try:
        return _by_kept_graph(graph, of, arrays[count + 1 :], _extra_axes(levels), arrays[:count])
    except RandomnessError:  # rows that draw from separate keys run one after another
        return run(forward, [*arrays[:count], *arrays[count + 1 :]])
    except RuntimeError as error:
        # For some operators torch has a forward mode, and a gradient that it cannot differentiate.
        if isinstance(error, DifferentiationError) or not _lacks_derivative(error):
            raise
        return run(forward, [*arrays[:count], *arrays[count + 1 :]])


def _lacks_derivative(error: RuntimeError) -> bool:
    """Return whether torch raised an error because an operator has no derivative."""
    return "is not implemented" in text_of(error)


def _by_kept_graph(
    graph: AutogradGraph, of: Vjp, tangents_in: Sequence[Any], extra: Sequence[int], like: list[jax.Array]
) -> list[jax.Array]:
    with recording():
        outputs = [graph.outputs[o] for o in of.outs]
        tangents = [copied_tensor(dx) for dx in tangents_in]
        try:
            dys = _by_two_pullbacks(graph, of, tangents, extra)
        except RuntimeError as error:
            # Torch may fail to differentiate a gradient that it computes, such as that of a sparse CSR tensor.
            is_refusal = isinstance(error, DifferentiationError) and not isinstance(error, DetachedBackwardError)
            if is_refusal or _lacks_derivative(error):
                raise
            found = product_by_rows(graph, of, tangents, extra)
            if found is None:
                raise
            dys = found
    # Torch's gradient of a norm at zero is 0, and torch's derivative of this gradient is NaN.
    if have_nan(dys) and not have_nan([*outputs, *tangents]):
        rows = product_by_rows(graph, of, tangents, extra, dys)
        dys = dys if rows is None else without_nan(dys, rows)
    sizes = [tangents[0].shape[axis] for axis in extra]
    results = [dy.to(y.dtype).reshape(with_axes(y.shape, extra, sizes)) for dy, y in zip(dys, outputs, strict=True)]
    del dys
    return results_to_jax(results, like, of)


def _by_two_pullbacks(
    graph: AutogradGraph, of: Vjp, tangents: Sequence[torch.Tensor], extra: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    outputs = [graph.outputs[o] for o in of.outs]
    at = [torch.ones_like(y, memory_format=torch.contiguous_format).requires_grad_() for y in outputs]
    gradients = graph.pull(at, of, (), create_graph=True)
    refuse_error_node(gradients, of)
    if may_be_nonlinear(outputs, has_hooks=graph.has_hooks):
        refuse_nonlinear(
            of.base.name, gradients, graph.pull([v.detach() * SMALL for v in at], of, (), create_graph=False)
        )
    pullback = graph.derived(at, gradients)
    back = Vjp(of, tuple(range(len(at))), tuple(range(len(gradients))))
    return pullback.pull(tangents, back, extra, create_graph=False)


def _inputs_of(transpose: TorchFunction, forward: TorchFunction) -> int:
    """Return the number of inputs of the differentiated function."""
    return len(transpose.in_types) - len(forward.out_types)


# The transpose in dx:  ct -> ct @ Df(x).
def _linear_transpose(
    cotangents: Sequence[Any], *args: Any, forward: Any, transpose: Any, levels: Any, spread: Any
) -> Any:
    count = _inputs_of(transpose, forward)
    x, token, linear = args[:count], args[count], args[count + 1 :]
    if all(is_symbolic_zero(ct) for ct in cotangents):
        return [None] * (count + 1) + [ad.Zero(t.aval) if ad.is_undefined_primal(t) else None for t in linear]
    # Unused results are left out: their gradients are None in torch, not zeros.
    used = [i for i, c in enumerate(cotangents) if not is_symbolic_zero(c)]
    ct = [cotangents[i] for i in used]
    if len(used) < len(cotangents):
        transpose = of_results(transpose, used)
    if current_context() is Context.STAGED:
        grads = bound_in_program(transpose, [*x, *ct])
    else:
        *grads, _ = eager_pullback_p.bind(
            *x, token, *ct, fn=transpose, count=count, levels=levels, spread=spread, keep=(), batch=()
        )
    return [None] * (count + 1) + [
        sharded_like(grad, t.aval) if ad.is_undefined_primal(t) else None for grad, t in zip(grads, linear, strict=True)
    ]


def _linear_batch(
    args: Sequence[Any], dims: Sequence[Any], *, forward: Any, transpose: Any, levels: Any, spread: Any
) -> Any:
    size, level, batched, x_dims = _batched_operands(args, dims, _inputs_of(transpose, forward), spread)
    tangent_dims = (0,) * (len(batched) - len(x_dims) - 1)
    out = eager_linear_p.bind(
        *batched,
        forward=EagerVmap(forward, (*x_dims, *tangent_dims), size),
        transpose=EagerVmap(transpose, (*x_dims, *(0,) * len(forward.out_types)), size),
        levels=(level, *levels),
        spread=spread,
    )
    return out, [0] * len(out)


def _batched_operands(
    args: Sequence[Any], dims: Sequence[Any], count: int, spread: Sequence[int], keep: Sequence[int] = ()
) -> tuple[int, str, list[Any], tuple[Any, ...]]:
    """Return the operands ``(x..., token, t...)`` of a linear map over a batch, with their batch axes first.

    The tangents or cotangents t all get a batch axis.

    Args:
        args: the operands.
        dims: the batch axes of the operands.
        count: the number of x.
        spread: the positions of the x that have every level in the graph.
        keep: the positions, in ``(x..., t...)``, of the operands by which a row of the result will be differentiated.

    Returns:
        The size of the batch, its level, the operands, and the batch axes of the x. The token has no graph if an x has
        a batch axis that the graph does not have, or needs one because each row will have its own gradient.
    """
    size = batch_size(args, dims)
    level = "extra" if dims[count] is None else "graph"
    (*x, token), (*x_dims, _) = batch_first(args[: count + 1], dims[: count + 1])
    if level == "extra" and (keep or any(dim is not None for dim in x_dims)):
        token = np.empty(token.shape, np.uint8)
    if level == "graph" or keep:
        for i in sorted({*spread, *keep} & {*range(count)}):
            x[i], x_dims[i] = to_front(x[i], x_dims[i], size), 0
    differentiated = [to_front(t, d, size) for t, d in zip(args[count + 1 :], dims[count + 1 :], strict=True)]
    return size, level, [*x, token, *differentiated], tuple(x_dims)


def _linear_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, forward: Any, transpose: Any, levels: Any, spread: Any
) -> Any:
    count = _inputs_of(transpose, forward)
    also = nonzero_inputs(transpose.in_types[:count], [not is_symbolic_zero(t) for t in tangents[:count]])
    spread = tuple(sorted({*spread, *also}))
    params = {"forward": forward, "transpose": transpose, "levels": levels, "spread": spread}
    results = eager_linear_p.bind(*primals, **params)
    if all(is_symbolic_zero(t) for t in tangents[:count]):  # the tangent of a map that is linear in dx is the same map
        linear = [ad.instantiate_zeros(t) for t in tangents[count + 1 :]]
        return results, eager_linear_p.bind(*primals[: count + 1], *linear, **params)
    args = [*primals[:count], *primals[count + 1 :]]
    differentiated = [*tangents[:count], *tangents[count + 1 :]]
    return results, eager_tangents(forward, results, args, differentiated, NO_TOKEN)


def _linear_traced(*args: Any, forward: Any, transpose: Any, levels: Any, spread: Any) -> list[Any]:
    del levels, spread
    count = _inputs_of(transpose, forward)
    return bound_in_program(forward, [*args[:count], *args[count + 1 :]])


eager_linear_p.def_impl(run_outside_transforms(_linear_impl))
eager_linear_p.def_abstract_eval(lambda *avals, forward, **_: result_avals(forward, avals))
mlir.register_lowering(eager_linear_p, lower_as(_linear_traced))
ad.primitive_jvps[eager_linear_p] = _linear_jvp
ad.primitive_transposes[eager_linear_p] = _linear_transpose
batching.primitive_batchers[eager_linear_p] = _linear_batch


# --- eager_pullback -----------------------------------------------------------------------------------------------


def _pullback_impl(
    *args: Any, fn: Any, count: int, levels: Any, spread: Any, keep: tuple[int, ...], batch: Any
) -> list[jax.Array]:
    del spread
    arrays = as_arrays(args)
    x, ct = arrays[:count], arrays[count + 1 :]
    graph = graph_in(arrays[count])
    if not keep:
        return [*_pulled_gradients(graph, fn, x, ct, _extra_axes(levels)), Placement([]).empty((*batch, 0))]
    grads, derived = _recorded_gradients(graph, fn, x, ct, _extra_axes(levels), keep)
    return [*grads, token_for(derived, batch)]


def _pulled_gradients(
    graph: AutogradGraph | None, fn: TorchFunction, x: list[jax.Array], ct: list[jax.Array], extra: Sequence[int]
) -> list[jax.Array]:
    if graph is None:
        return run(fn, [*x, *ct])
    of = innermost_vjp(fn)
    try:
        with recording(), torch.no_grad():
            cotangents = [copied_tensor(c) for c in ct]
            grads = list(graph.pull(cotangents, of, extra, create_graph=False))
    except RandomnessError:  # rows that draw from separate keys run one after another
        return run(fn, [*x, *ct])
    except RuntimeError as error:
        if isinstance(error, DifferentiationError) or not (is_batched(fn) or escapes_vmap(error)):
            raise
        eager_function(fn).row_by_row = True  # for some operators only the gradient of a batch fails
        return run(fn, [*x, *ct])
    grads = [g.to(graph.inputs[i].dtype) for g, i in zip(grads, of.wrt, strict=True)]
    del cotangents
    return results_to_jax(grads, x, fn)


def _recorded_gradients(
    graph: AutogradGraph | None,
    fn: TorchFunction,
    x: list[jax.Array],
    ct: list[jax.Array],
    extra: Sequence[int],
    keep: Sequence[int],
) -> tuple[list[jax.Array], AutogradGraph]:
    """Return the gradients, and the graph by which they can be differentiated."""
    if graph is None:
        return run_recorded(fn, [*x, *ct], keep)
    with recording():
        cotangents = [copied_tensor(c) for c in ct]
        for c in cotangents:
            c.requires_grad_(c.is_floating_point() or c.is_complex())
        try:
            grads = graph.pull(cotangents, innermost_vjp(fn), extra, create_graph=True)
        except RandomnessError:  # rows that draw from separate keys run one after another
            return run_recorded(fn, [*x, *ct], keep)
    place = Placement(x)
    results = [place.copied(grad, eager_function(fn).name) for grad in grads]
    place.release()
    return results, graph.derived([*graph.inputs, *cotangents], grads)


def _pullback_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    fn: Any,
    count: int,
    levels: Any,
    spread: Any,
    keep: Any,
    batch: Any,
) -> Any:
    differentiated = _without_item(tangents, count)
    wrt = nonzero_inputs(fn.in_types, [not is_symbolic_zero(t) for t in differentiated])
    results, token, spread = _pullback_with_graph(
        primals, wrt, fn=fn, count=count, levels=levels, spread=spread, keep=keep, batch=batch
    )
    derivatives = eager_tangents(fn, results, _without_item(primals, count), differentiated, token, spread)
    return [*results, token], derivatives + zero_tangents([token])


def _pullback_linearize(
    is_vjp: bool,
    nonzeros: Sequence[bool],
    *primals: Any,
    fn: Any,
    count: int,
    levels: Any,
    spread: Any,
    keep: Any,
    batch: Any,
) -> Any:
    del is_vjp
    wrt = nonzero_inputs(fn.in_types, _without_item(nonzeros, count))
    results, token, spread = _pullback_with_graph(
        primals, wrt, fn=fn, count=count, levels=levels, spread=spread, keep=keep, batch=batch
    )
    _, nonzero_outs, residuals, apply = linearized(fn, wrt, results, token, _without_item(primals, count), spread)
    zero = zero_tangents([token])

    def with_token(saved: Sequence[Any], *tangents: Any) -> list[Any]:
        return [*apply(saved, *_without_item(tangents, count)), *zero]

    return [*results, token], [*nonzero_outs, False], residuals, with_token


def _pullback_with_graph(
    primals: Sequence[Any], wrt: Sequence[int], *, count: int, spread: Sequence[int], keep: Sequence[int], **params: Any
) -> tuple[list[Any], Any, tuple[int, ...]]:
    """Run a pullback so that it can be differentiated with respect to `wrt`.

    Returns:
        The results, the token of their graph, and the positions of the arguments ``(x..., ct...)`` that have every
        level in this graph.
    """
    keep = tuple(sorted({*keep, *wrt}))
    *results, token = eager_pullback_p.bind(*primals, count=count, spread=spread, keep=keep, **params)
    return results, token, tuple(sorted({*spread, *keep, *range(count, len(primals) - 1)}))


def _without_item(items: Sequence[Any], position: int) -> list[Any]:
    return [*items[:position], *items[position + 1 :]]


def _pullback_batch(
    args: Sequence[Any], dims: Sequence[Any], *, fn: Any, count: int, levels: Any, spread: Any, keep: Any, batch: Any
) -> Any:
    # The graph holds the x, so an x needs the batch axis only if an outer transformation must see it.
    seen = spread if keep or current_context() is not Context.EAGER else ()
    size, level, batched, x_dims = _batched_operands(args, dims, count, seen, keep)
    out = eager_pullback_p.bind(
        *batched,
        fn=EagerVmap(fn, (*x_dims, *(0,) * (len(batched) - count - 1)), size),
        count=count,
        levels=(level, *levels),
        spread=spread,
        keep=keep,
        batch=(size, *batch),
    )
    return out, [0] * len(out)


def _pullback_traced(*args: Any, fn: Any, count: int, levels: Any, spread: Any, keep: Any, batch: Any) -> list[Any]:
    del levels, spread, keep
    return [*bound_in_program(fn, _without_item(args, count)), jax.numpy.zeros((*batch, 0), np.uint8)]


eager_pullback_p.def_impl(run_outside_transforms(_pullback_impl))
eager_pullback_p.def_abstract_eval(lambda *avals, fn, batch, **_: [*result_avals(fn, avals), token_aval(batch, avals)])
mlir.register_lowering(eager_pullback_p, lower_as(_pullback_traced))
ad.primitive_jvps[eager_pullback_p] = _pullback_jvp
add_linearization(eager_pullback_p, _pullback_linearize)
batching.primitive_batchers[eager_pullback_p] = _pullback_batch
