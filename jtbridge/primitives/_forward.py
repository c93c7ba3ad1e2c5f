"""``torch_forward[fn](x...) -> (y..., residuals...)``: a torch function, with the residuals that its backward needs.

The residuals only save time. `torch_backward` uses them, but its value is a function of x and the cotangents alone, and
it is differentiated as that function. So the tangents of the residuals are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.interpreters import ad, batching

from jtbridge.core.functions import TorchFunction
from jtbridge.core.primitive_rules import batch_first, batch_size, with_sharded_rows, zero_tangents
from jtbridge.transforms import Vmap

from ._binding import traced_tangents
from ._common import bind, new_primitive, probe
from ._transpose import transpose_linear

torch_forward_p = new_primitive("torch_forward", lambda *args, fn, forward: (forward, args))


# jvp:  dy = Df(x) dx,  dr = 0.
def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, fn: TorchFunction, forward: Any, backend: str) -> Any:
    results = bind(torch_forward_p, *primals, fn=fn, forward=forward, backend=backend)
    y_tangents = traced_tangents(fn, results[: len(fn.out_types)], primals, tangents, backend)
    return results, y_tangents + zero_tangents(results[len(fn.out_types) :])


# transpose, of a linear f:  ct -> ct @ Df(0). The residuals are constants.
def _transpose(cotangents: Sequence[Any], *operands: Any, fn: TorchFunction, forward: Any, backend: str) -> list[Any]:
    del forward
    return transpose_linear(fn, cotangents[: len(fn.out_types)], operands, backend)


# batching:  one call of the function, and of its graph, for the whole batch; every residual is batched.
def _batch(args: Sequence[Any], dims: Sequence[Any], *, fn: TorchFunction, forward: Any, backend: str) -> Any:
    size = batch_size(args, dims)
    args, dims = batch_first(args, dims)
    batched = Vmap(forward, dims, size)
    probe(batched, backend)
    results = bind(torch_forward_p, *args, fn=Vmap(fn, dims, size), forward=batched, backend=backend)
    return with_sharded_rows(results, args, dims), [0] * len(results)


ad.primitive_jvps[torch_forward_p] = _jvp
ad.primitive_transposes[torch_forward_p] = _transpose
batching.primitive_batchers[torch_forward_p] = _batch
