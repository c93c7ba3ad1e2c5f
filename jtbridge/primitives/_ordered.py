"""``torch_ordered[fn](x...) -> y...``: run a torch function for its side effects too, in program order.

The primitive is `jax.experimental.io_callback(ordered=True)`, with its own error messages for transformations that
cannot keep the order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import io_callback
from jax.interpreters import ad, batching, mlir

from jtbridge._backends import call_on_host, numpy_callback
from jtbridge._compat import ORDERED_EFFECT, call_aval
from jtbridge.core.debug import check_results
from jtbridge.core.functions import TracedFunction
from jtbridge.core.primitive_rules import primitive_of_several_results
from jtbridge.errors import EffectsError

from ._common import bind

torch_ordered_p = primitive_of_several_results("torch_ordered")


def torch_ordered(*args: Any, fn: TracedFunction) -> list[Any]:
    """Run `fn` as part of a JAX program that keeps every call and the order of the calls."""
    return bind(torch_ordered_p, *args, fn=fn)


def _impl(*args: Any, fn: TracedFunction) -> list[jax.Array]:
    jax.effects_barrier()  # wait for ordered calls of compiled programs that still run
    results = jax.device_put(list(numpy_callback(fn, fn.device, as_is=True)(*args)))
    check_results(f"`{fn.name}`", results)
    return results


def _abstract_eval(*avals: Any, fn: TracedFunction) -> tuple[list[Any], set[Any]]:
    return [call_aval(type_.shape, type_.dtype, avals) for type_ in fn.out_types], {ORDERED_EFFECT}


def _lowering(ctx: mlir.LoweringRuleContext, *operands: Any, fn: TracedFunction) -> Sequence[Any]:
    def call(*arrays: jax.Array) -> list[jax.Array]:
        return call_on_host(fn, functools.partial(io_callback, ordered=True), arrays, fn.device)

    return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)


def _refusing_rule(what: str) -> Callable[..., Any]:
    def rule(*_: Any, fn: TracedFunction, **__: Any) -> Any:
        raise EffectsError(
            f'`{fn.name}` is wrapped with effects="ordered" and cannot be {what}: its calls would no longer happen '
            "once each and in order. Wrap the part with side effects on its own and keep it out of the transformation "
            "(`jax.lax.map` or `jax.lax.scan` for rows, `jax.lax.stop_gradient` on its arguments)."
        )

    return rule


torch_ordered_p.def_impl(_impl)
torch_ordered_p.def_effectful_abstract_eval(_abstract_eval)
ad.primitive_jvps[torch_ordered_p] = _refusing_rule("differentiated")
batching.primitive_batchers[torch_ordered_p] = lambda args, dims, **params: _refusing_rule("vmapped")(**params)
mlir.register_lowering(torch_ordered_p, _lowering)
