"""``torch_linear[f](x..., saved..., dx...) -> dy...``: Df(x) dx, linear in dx.

Its parameters are functions for both directions: `forward` computes (x, dx) -> dy, `transpose` computes
(x, ct) -> ct @ Df(x), and `backward`, unless it is None, computes the same as `transpose` from the saved arrays,
without running f again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.interpreters import ad, batching

from jtbridge.capture import without_cotangents
from jtbridge.core.functions import TorchFunction
from jtbridge.core.primitive_rules import batch_first, batch_size, sharded_like, to_front, with_sharded_rows
from jtbridge.transforms import Vmap, of_results

from ._backward import torch_backward_p
from ._binding import linear_operands, torch_call, torch_linear_p, traced_tangents
from ._common import bind, probe


# jvp at (x, dx) along (x', dx'):  D(Df(x) dx) = derivative of the function (x, dx) -> Df(x) dx.
def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, backend: str, **params: Any) -> Any:
    results = bind(torch_linear_p, *primals, backend=backend, **params)
    forward, args = linear_operands(*primals, **params)
    _, differentiated = linear_operands(*tangents, **params)
    inputs, saved = params["counts"]
    if all(type(t) is ad.Zero for t in differentiated[:inputs]):  # linear in dx: the derivative is the map itself
        linear = [ad.instantiate_zeros(t) for t in differentiated[inputs:]]
        return results, bind(torch_linear_p, *primals[: inputs + saved], *linear, backend=backend, **params)
    return results, traced_tangents(forward, results, args, differentiated, backend)


# transpose in dx:  ct -> ct @ Df(x), by the backward graph if the forward saved residuals.
def _transpose(
    cotangents: Sequence[Any],
    *args: Any,
    forward: TorchFunction,
    transpose: TorchFunction,
    backward: TorchFunction | None,
    counts: tuple[int, int],
    backend: str,
) -> Any:
    del forward
    inputs, saved = counts
    x, residuals, linear = args[:inputs], args[inputs : inputs + saved], args[inputs + saved :]
    if all(type(ct) is ad.Zero for ct in cotangents):
        return [None] * (inputs + saved) + [ad.Zero(t.aval) if ad.is_undefined_primal(t) else None for t in linear]
    # Unused results are left out: their gradients are None in torch, not zeros.
    used = [i for i, c in enumerate(cotangents) if type(c) is not ad.Zero]
    ct = [cotangents[i] for i in used]
    if len(used) < len(cotangents):
        transpose = of_results(transpose, used)
        backward = backward and without_cotangents(backward, used, len(cotangents))
        if isinstance(backward, Vmap):
            probe(backward, backend)
    if backward is None:
        grads = torch_call(*x, *ct, fn=transpose, backend=backend)
    else:
        grads = bind(
            torch_backward_p,
            *x,
            *residuals,
            *ct,
            fn=transpose,
            backward=backward,
            counts=counts,
            backend=backend,
        )
    return [None] * (inputs + saved) + [
        sharded_like(grad, t.aval) if ad.is_undefined_primal(t) else None for grad, t in zip(grads, linear, strict=True)
    ]


# batching:  every dx gets a batch axis, so that the transpose never has to sum over the batch.
def _batch(
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    forward: TorchFunction,
    transpose: TorchFunction,
    backward: TorchFunction | None,
    counts: tuple[int, int],
    backend: str,
) -> Any:
    inputs, saved = counts
    size = batch_size(args, dims)
    linear = [to_front(t, d, size) for t, d in zip(args[inputs + saved :], dims[inputs + saved :], strict=True)]
    known, known_dims = batch_first(args[: inputs + saved], dims[: inputs + saved])
    x_dims, saved_dims = known_dims[:inputs], known_dims[inputs:]
    new_forward = Vmap(forward, x_dims + (0,) * len(linear), size)
    probe(new_forward, backend)
    cotangent_dims = (0,) * (len(transpose.in_types) - inputs)
    out = bind(
        torch_linear_p,
        *known,
        *linear,
        forward=new_forward,
        transpose=Vmap(transpose, x_dims + cotangent_dims, size),
        backward=None if backward is None else Vmap(backward, saved_dims + cotangent_dims, size),
        counts=counts,
        backend=backend,
    )
    return with_sharded_rows(out, args, dims), [0] * len(out)


ad.primitive_jvps[torch_linear_p] = _jvp
ad.primitive_transposes[torch_linear_p] = _transpose
batching.primitive_batchers[torch_linear_p] = _batch
