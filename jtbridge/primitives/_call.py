"""``torch_call[fn](x...) -> y...``: run a torch function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.interpreters import ad, batching

from jtbridge._compat import add_linearization
from jtbridge._flat import TorchFunction
from jtbridge._transforms import Vmap
from jtbridge.capture import Split, check_differentiable, split

from ._common import (
    batch_first,
    batch_size,
    bind,
    differentiable,
    new_primitive,
    nonzero_inputs,
    probe,
    will_translate,
    zero_tangents,
)
from ._forward import torch_forward_p
from ._linear import differential, tangents_out

torch_call_p = new_primitive("torch_call", lambda *args, fn: (fn, args))


def torch_call(*args: Any, fn: TorchFunction, backend: str) -> list[Any]:
    """Run `fn`, a torch function of flat arrays, as part of a JAX program."""
    return bind(torch_call_p, *args, fn=fn, backend=backend)


# jvp:  y = f(x),  dy = Df(x) dx.  In forward mode nothing is kept for a backward pass.
def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, fn: TorchFunction, backend: str) -> Any:
    results = torch_call(*primals, fn=fn, backend=backend)
    return results, tangents_out(fn, results, primals, tangents, backend)


# linearize, vjp, grad:  (y, r) = f_forward(x)  and the linear map dx -> Df(x) dx, whose transpose uses x and r.
def _linearize(is_vjp: bool, nonzeros: Sequence[bool], *primals: Any, fn: TorchFunction, backend: str) -> Any:
    wrt = nonzero_inputs(fn.in_types, nonzeros)
    outs = differentiable(fn.out_types)
    if not wrt or not outs:
        results = torch_call(*primals, fn=fn, backend=backend)
        zeros = zero_tangents(results)
        return results, [False] * len(results), (), lambda _, *tangents: zeros
    check_differentiable(fn, wrt, again=fn.order > 0 or not is_vjp)
    kept = split(fn, wrt, outs, translated=will_translate(fn, backend)) if is_vjp else "forward mode keeps nothing"
    backward = None
    saved: list[Any] = []
    if isinstance(kept, Split):
        everything = bind(torch_forward_p, *primals, fn=fn, forward=kept.forward, backend=backend)
        results = everything[: len(fn.out_types)]
        available = [*primals, *everything]
        saved = [available[source] for source in kept.sources]
        backward = kept.backward
    else:
        results = torch_call(*primals, fn=fn, backend=backend)
    zeros = zero_tangents(results)

    def linearized(residuals: Sequence[Any], *tangents: Any) -> list[Any]:
        count = len(primals)
        moved = differential(
            fn,
            wrt,
            residuals[:count],
            [tangents[i] for i in wrt],
            backend=backend,
            saved=residuals[count:],
            backward=backward,
        )
        out = list(zeros)
        for o, tangent in zip(outs, moved, strict=True):
            out[o] = tangent
        return out

    return results, [o in outs for o in range(len(results))], [*primals, *saved], linearized


# batching:  one call of vmap(f) for the whole batch.
def _batch(args: Sequence[Any], dims: Sequence[Any], *, fn: TorchFunction, backend: str) -> Any:
    size = batch_size(args, dims)
    args, dims = batch_first(args, dims)
    batched = Vmap(fn, dims, size)
    probe(batched, backend)
    results = torch_call(*args, fn=batched, backend=backend)
    return results, [0] * len(results)


ad.primitive_jvps[torch_call_p] = _jvp
add_linearization(torch_call_p, _linearize)
batching.primitive_batchers[torch_call_p] = _batch
