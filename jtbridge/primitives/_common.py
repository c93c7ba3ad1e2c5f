"""Shared parts of the primitives: eager runs, abstract values, lowering, and whether a function will be translated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jtbridge._backends import choose_backend, may_have_islands, order_after_current_streams, translates
from jtbridge._compat import (
    add_nan_check,
    call_aval,
    is_divided,
    is_exported,
    is_in_reduction,
    refuse_in_jet,
    register_with_jet,
    unify_varying_axes,
)
from jtbridge.capture import probe_vmap
from jtbridge.core import tuning
from jtbridge.core.backend_names import WITHOUT_KERNELS
from jtbridge.core.debug import check_results, without_debug_switches
from jtbridge.core.functions import TorchFunction
from jtbridge.core.primitive_rules import describe, primitive_of_several_results
from jtbridge.errors import BackendError, DifferentiationError
from jtbridge.transforms import Vmap
from jtbridge.translate import precision, untranslatable_reason


def new_primitive(name: str, select: Callable[..., tuple[TorchFunction, Sequence[Any]]]) -> Primitive:
    """Return a primitive that computes the value of a torch function.

    `select(*operands, **params)` returns the function to run and the operands that it takes.
    """
    primitive = primitive_of_several_results(name)

    def impl(*args: Any, backend: str, **params: Any) -> list[jax.Array]:
        fn, operands = select(*args, **params)
        with without_debug_switches():
            results = run_now(primitive, fn, operands, args, dict(params, backend=backend))
        # Residuals after the results are not checked: the user does not see them, and a mask may hold infinities.
        function = _function_of(params)
        check_results(describe(function), results[: len(function.out_types)])
        return results

    def abstract_eval(*avals: Any, backend: str, **params: Any) -> list[Any]:
        del backend
        fn, _ = select(*avals, **params)
        return [call_aval(type_.shape, type_.dtype, avals) for type_ in fn.out_types]

    def lowering(ctx: mlir.LoweringRuleContext, *args: Any, backend: str, **params: Any) -> Sequence[Any]:
        fn, operands = select(*args, **params)
        _, avals = select(*ctx.avals_in, **params)
        platforms = ctx.module_context.platforms if ctx.platforms is None else ctx.platforms
        reduces = is_in_reduction(ctx)
        pure = (
            is_exported(ctx) or is_divided(ctx) or reduces or len(platforms) > 1 or not may_have_islands(platforms[0])
        )
        chosen = [choose_backend(backend, platform, fn, pure=pure) for platform in platforms]
        calls = any(each.kind == "call" for each in chosen)
        if calls and backend == "auto":
            _refuse_missing_formula(fn)
        if calls and backend == "auto" and is_exported(ctx):
            raise BackendError(
                f"An exported program runs without torch, so it has to be translated, but "
                f"{untranslatable_reason(fn, pure=True)}"
            )
        if calls and reduces:
            why = untranslatable_reason(fn, pure=True) or (
                f'`backend="{backend}"` was chosen. Choose "auto" or "{WITHOUT_KERNELS}".'
            )
            raise BackendError(
                f"`{fn.base.name}` is used in the body of `jax.lax.reduce`, `reduce_window` or `scatter_apply`. XLA "
                f"cannot call torch there, so the function has to be translated, but {why}"
            )
        if calls and len(platforms) > 1:
            raise BackendError(
                f"`{fn.base.name}` is called, not translated, and a call out of XLA cannot be lowered for several "
                f"platforms at once ({', '.join(platforms)}). Lower for one platform at a time."
            )
        # A program with Triton kernels is valid on all platforms: without Triton, a kernel is lowered to its reference.
        serving_all = next((each for each in chosen if each.uses_kernels), chosen[0])
        return serving_all.lower(ctx.replace(avals_in=list(avals)), fn, operands)

    def refuse_jet(**params: Any) -> NoReturn:
        fn = _function_of(params)
        raise DifferentiationError(
            f"{describe(fn)} was put under `jax.experimental.jet`, which has no rule for torch functions: torch has no "
            "Taylor mode. Nest `jax.jvp` for higher derivatives."
        )

    def describe_results(**params: Any) -> tuple[str, int]:
        fn = _function_of(params)
        return f"{name} of {describe(fn)}", len(fn.out_types)

    primitive.def_impl(impl)
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, lowering)
    add_nan_check(primitive, describe_results)
    refuse_in_jet(primitive, refuse_jet)
    return primitive


def _refuse_missing_formula(fn: TorchFunction) -> None:
    """Raise if torch is to compute a derivative that needs the missing derivative of a custom operator.

    Raises:
        DifferentiationError: the derivative is missing. Without this check, torch would raise when the program runs.
    """
    reason = untranslatable_reason(fn) or ""
    if "no autograd formula was registered" in reason:  # torch's words
        raise DifferentiationError(f"Torch has no derivative of this order of `{fn.base.name}`: {reason}")


def _function_of(params: dict[str, Any]) -> TorchFunction:
    """Return the function whose results are the first results of a primitive; residuals may follow them."""
    return params["fn"] if "fn" in params else params["forward"]


def bind(primitive: Primitive, *args: Any, **params: Any) -> list[Any]:
    """Bind a primitive; inside a shard_map, first make all operands vary over the same mesh axes."""
    register_with_jet()
    return primitive.bind(*unify_varying_axes(args), **params)


def run_now(
    primitive: Primitive,
    fn: TorchFunction,
    operands: Sequence[Any],
    args: Sequence[Any],
    params: dict[str, Any],
) -> list[jax.Array]:
    """Run a primitive eagerly.

    If the backend calls torch and all arrays lie on one CPU device, torch runs directly. Otherwise a compiled program
    runs.
    """
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in operands]
    devices = {device for x in arrays for device in x.sharding.device_set}
    platform = next(iter(devices)).platform if devices else jax.default_backend()
    if len(devices) <= 1 and platform == "cpu":
        backend = choose_backend(params["backend"], platform, fn)
        if backend.kind == "call":
            return backend.call(fn, arrays)
    args = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in args]
    places = tuple((x.sharding, x.committed, x.weak_type) for x in args)
    settings = (precision(fn.base), jax.config.jax_default_device, tuning.generation())  # type: ignore[attr-defined]
    key = (primitive, *sorted(params.items(), key=lambda item: item[0]), places, settings)
    compiled = fn.base.cache.compiled
    if key not in compiled:
        # The compiled program is stored, not the function that `jax.jit` returns. JAX's cache would hold that
        # function's program, the program holds `fn`, and the cache of `fn` would hold that function: none would ever be
        # freed.
        compiled[key] = jax.jit(functools.partial(primitive.bind, **params)).lower(*args).compile()
    order_after_current_streams(devices)
    return compiled[key](*args)


def will_translate(fn: TorchFunction, backend: str) -> bool:
    """Return whether a function will be translated rather than called."""
    return translates(backend) and untranslatable_reason(fn) is None


def probe(fn: Vmap, backend: str) -> None:
    """Find out whether torch.vmap can batch a function, if torch is to run it."""
    if not will_translate(fn, backend):
        probe_vmap(fn)
