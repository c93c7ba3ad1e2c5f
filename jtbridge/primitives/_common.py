"""What the primitives share: running eagerly, abstract values, lowering, and moving batch axes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jtbridge._compat import call_aval, unify_varying_axes
from jtbridge._flat import ArrayType, TorchFunction
from jtbridge._transforms import Vmap
from jtbridge.backends import choose, translates
from jtbridge.capture import probe_vmap
from jtbridge.errors import BackendError
from jtbridge.translate import refusal


def new_primitive(name: str, select: Callable[..., tuple[TorchFunction, Sequence[Any]]]) -> Primitive:
    """A primitive whose value is that of a torch function.

    `select(*operands, **params)` gives the function to run and the operands it takes.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def impl(*args: Any, backend: str, **params: Any) -> list[jax.Array]:
        fn, operands = select(*args, **params)
        return run_now(primitive, fn, operands, args, dict(params, backend=backend))

    def abstract_eval(*avals: Any, backend: str, **params: Any) -> list[Any]:
        del backend
        fn, _ = select(*avals, **params)
        return [call_aval(type_.shape, type_.dtype, avals) for type_ in fn.out_types]

    def lowering(ctx: mlir.LoweringRuleContext, *args: Any, backend: str, **params: Any) -> Sequence[Any]:
        fn, operands = select(*args, **params)
        _, avals = select(*ctx.avals_in, **params)
        platforms = ctx.module_context.platforms if ctx.platforms is None else ctx.platforms
        chosen = [choose(backend, platform, fn) for platform in platforms]
        if len(platforms) > 1 and any(each.way == "call" for each in chosen):
            raise BackendError(
                f"`{fn.flat.name}` is called, not translated, and a call out of XLA cannot be lowered for several "
                f"platforms at once ({', '.join(platforms)}). Lower for one platform at a time."
            )
        # A program with Triton kernels has none of them on a platform without: it serves all.
        widest = next((each for each in chosen if each.name == "triton"), chosen[0])
        return widest.lower(ctx.replace(avals_in=list(avals)), fn, operands)

    primitive.def_impl(impl)
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, lowering)
    return primitive


def bind(primitive: Primitive, *args: Any, **params: Any) -> list[Any]:
    """Bind with all operands as varying over the mesh axes of a shard_map as the others."""
    return primitive.bind(*unify_varying_axes(args), **params)


def run_now(
    primitive: Primitive,
    fn: TorchFunction,
    operands: Sequence[Any],
    args: Sequence[Any],
    params: dict[str, Any],
) -> list[jax.Array]:
    """Run eagerly: torch directly where it is called and all arrays lie on one CPU device, else a compiled program."""
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in operands]
    devices = {device for x in arrays for device in x.sharding.device_set}
    platform = next(iter(devices)).platform if devices else jax.default_backend()
    if len(devices) <= 1 and platform == "cpu":
        backend = choose(params["backend"], platform, fn)
        if backend.way == "call":
            return backend.call(fn, arrays)
    compiled = fn.flat.compiled
    key = (primitive, *sorted(params.items(), key=lambda item: item[0]))
    if key not in compiled:
        compiled[key] = jax.jit(functools.partial(primitive.bind, **params))
    return compiled[key](*args)


def will_translate(fn: TorchFunction, backend: str) -> bool:
    """Whether a function will be translated rather than called."""
    return translates(backend) and refusal(fn) is None


def probe(fn: Vmap, backend: str) -> None:
    """Find out how a batched function will run, if torch is to run it."""
    if not will_translate(fn, backend):
        probe_vmap(fn)


def zero_tangents(results: Sequence[Any]) -> list[Any]:
    """Symbolic zeros for results (float0 for integers and bools)."""
    return [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in results]


def nonzero_inputs(types: Sequence[ArrayType], nonzeros: Sequence[bool]) -> tuple[int, ...]:
    """Positions of the inputs that move: float or complex, with a tangent that is not symbolically zero."""
    return tuple(i for i, (type_, nz) in enumerate(zip(types, nonzeros, strict=True)) if nz and type_.differentiable)


def differentiable(types: Sequence[ArrayType]) -> tuple[int, ...]:
    """Positions of the float and complex types."""
    return tuple(i for i, type_ in enumerate(types) if type_.differentiable)


def batch_size(args: Sequence[Any], dims: Sequence[int | None]) -> int:
    """The length of the batch axis."""
    return next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)


def batch_first(args: Sequence[Any], dims: Sequence[int | None]) -> tuple[list[Any], tuple[int | None, ...]]:
    """Arrays with their batch axes first, so that in torch every row is as contiguous as a whole argument."""
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    return moved, tuple(None if d is None else 0 for d in dims)


def to_front(x: Any, dim: int | None, size: int) -> Any:
    """The array with its batch axis first; repeated along a new one if it has none."""
    if dim is None:
        return jnp.broadcast_to(x, (size, *jnp.shape(x)))
    return jnp.moveaxis(x, dim, 0)
