"""``torch_call[fn](x...) -> y...``: run a torch function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.interpreters import ad, batching

from jtbridge._compat import add_linearization, is_staging
from jtbridge.capture import Split, check_differentiable, split_or_reason
from jtbridge.core.functions import TorchFunction
from jtbridge.core.positions import replaced
from jtbridge.core.primitive_rules import (
    batch_first,
    batch_size,
    differentiable,
    nonzero_inputs,
    with_sharded_rows,
    zero_tangents,
)
from jtbridge.transforms import Vmap

from ._binding import differential, torch_call, torch_call_p, traced_tangents
from ._common import bind, probe, will_translate
from ._forward import torch_forward_p
from ._transpose import transpose_linear


# jvp:  y = f(x),  dy = Df(x) dx.  In a staged program the tangents may be transposed later, for example in
# jax.checkpoint and scan. So the forward saves residuals for the backward, and XLA removes unused residuals.
def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, fn: TorchFunction, backend: str) -> Any:
    wrt = nonzero_inputs(fn.in_types, [type(t) is not ad.Zero for t in tangents])
    outs = differentiable(fn.out_types)
    if wrt and outs and is_staging() and will_translate(fn, backend):
        check_differentiable(fn, wrt, again=True)
        results, saved, backward = _forward_with_residuals(primals, fn, wrt, outs, backend)
        differentiated = [tangents[i] for i in wrt]
        derivatives = differential(fn, wrt, primals, differentiated, backend=backend, saved=saved, backward=backward)
        return results, replaced(zero_tangents(results), outs, derivatives)
    results = torch_call(*primals, fn=fn, backend=backend)
    return results, traced_tangents(fn, results, primals, tangents, backend)


def _forward_with_residuals(
    primals: Sequence[Any], fn: TorchFunction, wrt: tuple[int, ...], outs: tuple[int, ...], backend: str
) -> tuple[list[Any], list[Any], TorchFunction | None]:
    """Return the results, the arrays that the backward needs, and the backward.

    If forward and backward cannot be split, there are no such arrays, and the backward is None.
    """
    translated = will_translate(fn, backend)
    if fn.base.batched and not translated:  # the graphs of a split are only valid for the number of rows of the trace
        return torch_call(*primals, fn=fn, backend=backend), [], None
    parts = split_or_reason(fn, wrt, outs, translated=translated)
    if not isinstance(parts, Split):
        return torch_call(*primals, fn=fn, backend=backend), [], None
    everything = bind(torch_forward_p, *primals, fn=fn, forward=parts.forward, backend=backend)
    available = [*primals, *everything]
    return everything[: len(fn.out_types)], [available[source] for source in parts.sources], parts.backward


# linearize, vjp, grad:  (y, r) = f_forward(x)  and the linear map dx -> Df(x) dx, whose transpose uses x and r.
def _linearize(is_vjp: bool, nonzeros: Sequence[bool], *primals: Any, fn: TorchFunction, backend: str) -> Any:
    wrt = nonzero_inputs(fn.in_types, nonzeros)
    outs = differentiable(fn.out_types)
    if not wrt or not outs:
        results = torch_call(*primals, fn=fn, backend=backend)
        zeros = zero_tangents(results)
        return results, [False] * len(results), (), lambda _, *tangents: zeros
    check_differentiable(fn, wrt, again=fn.order > 0 or not is_vjp)
    if is_vjp:
        results, saved, backward = _forward_with_residuals(primals, fn, wrt, outs, backend)
    else:  # forward mode needs no residuals
        results, saved, backward = torch_call(*primals, fn=fn, backend=backend), [], None
    zeros = zero_tangents(results)

    def linearized(residuals: Sequence[Any], *tangents: Any) -> list[Any]:
        count = len(primals)
        derivatives = differential(
            fn,
            wrt,
            residuals[:count],
            [tangents[i] for i in wrt],
            backend=backend,
            saved=residuals[count:],
            backward=backward,
        )
        return replaced(zeros, outs, derivatives)

    return results, [o in outs for o in range(len(results))], [*primals, *saved], linearized


# transpose, of a linear f:  ct -> ct @ Df(0).
def _transpose(cotangents: Sequence[Any], *operands: Any, fn: TorchFunction, backend: str) -> list[Any]:
    return transpose_linear(fn, cotangents, operands, backend)


# batching:  one call of vmap(f) for the whole batch.
def _batch(args: Sequence[Any], dims: Sequence[Any], *, fn: TorchFunction, backend: str) -> Any:
    size = batch_size(args, dims)
    args, dims = batch_first(args, dims)
    batched = Vmap(fn, dims, size)
    probe(batched, backend)
    results = torch_call(*args, fn=batched, backend=backend)
    return with_sharded_rows(results, args, dims), [0] * len(results)


ad.primitive_jvps[torch_call_p] = _jvp
ad.primitive_transposes[torch_call_p] = _transpose
add_linearization(torch_call_p, _linearize)
batching.primitive_batchers[torch_call_p] = _batch
