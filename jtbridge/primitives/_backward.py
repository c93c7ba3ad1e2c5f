"""``torch_backward[fn](x..., saved..., ct...) -> grads...``: the backward graph on the arrays that the forward saved.

The value of the primitive is ``fn(x, ct)``, a vector-Jacobian product. Derivatives are taken of `fn`, which runs
torch's autograd on x itself. They are not taken of the graph, in which an `autograd.Function` is already inlined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.interpreters import ad, batching

from jtbridge.core.functions import TorchFunction
from jtbridge.core.primitive_rules import batch_first, batch_size, to_front, with_sharded_rows
from jtbridge.transforms import Vmap

from ._binding import traced_tangents
from ._common import bind, new_primitive, probe
from ._transpose import transpose_linear

torch_backward_p = new_primitive("torch_backward", lambda *args, backward, counts, **_: (backward, args[counts[0] :]))


# jvp:  the derivative of the function (x, ct) -> ct @ Df(x), which is fn.
def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    fn: TorchFunction,
    backward: TorchFunction,
    counts: tuple[int, int],
    backend: str,
) -> Any:
    results = bind(torch_backward_p, *primals, fn=fn, backward=backward, counts=counts, backend=backend)
    inputs, saved = counts
    args = [*primals[:inputs], *primals[inputs + saved :]]
    differentiated = [*tangents[:inputs], *tangents[inputs + saved :]]
    return results, traced_tangents(fn, results, args, differentiated, backend)


# transpose in ct:  dx -> Df(x) dx, computed as the transpose of fn.
def _transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    fn: TorchFunction,
    backward: TorchFunction,
    counts: tuple[int, int],
    backend: str,
) -> list[Any]:
    del backward
    inputs, saved = counts
    found = transpose_linear(fn, cotangents, [*operands[:inputs], *operands[inputs + saved :]], backend)
    return [*found[:inputs], *[None] * saved, *found[inputs:]]


# batching:  one call of the graph, and of fn, for the whole batch.
def _batch(
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    fn: TorchFunction,
    backward: TorchFunction,
    counts: tuple[int, int],
    backend: str,
) -> Any:
    inputs, saved = counts
    size = batch_size(args, dims)
    args, dims = batch_first(args, dims)
    if all(dim is None for dim in dims[inputs:]):  # only x is batched, and the backward of a linear function ignores x
        cotangents = [to_front(ct, None, size) for ct in args[inputs + saved :]]
        args, dims = [*args[: inputs + saved], *cotangents], (*dims[: inputs + saved], *(0,) * len(cotangents))
    batched = Vmap(backward, dims[inputs:], size)
    probe(batched, backend)
    results = bind(
        torch_backward_p,
        *args,
        fn=Vmap(fn, (*dims[:inputs], *dims[inputs + saved :]), size),
        backward=batched,
        counts=counts,
        backend=backend,
    )
    return with_sharded_rows(results, args, dims), [0] * len(results)


ad.primitive_jvps[torch_backward_p] = _jvp
ad.primitive_transposes[torch_backward_p] = _transpose
batching.primitive_batchers[torch_backward_p] = _batch
