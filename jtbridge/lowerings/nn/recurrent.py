"""Recurrent layers: one scan over the time steps with one product per step, and all other products outside of the scan.

`jtbridge.capture` defines the operators: `jtbridge::recurrent` for a layer, `jtbridge::recurrent_backward` for the
gradient of a layer, and `jtbridge::recurrent_double_backward` for the gradient of that gradient. The batch axis is
last: for small batches, XLA on a CPU computes ``weight @ h`` in half the time of ``h @ weight.T``.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jtbridge.core.recurrent_cells import CELLS
from jtbridge.lowerings._common import opmath
from jtbridge.lowerings._registry import register_lowering

State = tuple[jax.Array, jax.Array]

_XP = types.SimpleNamespace(sigmoid=jax.nn.sigmoid, tanh=jnp.tanh, where=jnp.where)


@register_lowering("jtbridge::recurrent")
def _recurrent(
    gates: jax.Array, h: jax.Array, c: jax.Array, weight: jax.Array, bias: jax.Array, project: jax.Array, cell: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    kind, dtype, inner = CELLS[cell], gates.dtype, opmath(gates.dtype)

    def step(state: tuple[jax.Array, ...], gate: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        h, c, _ = state
        more = jnp.matmul(weight, h).astype(inner)
        more = more + bias.astype(inner)[:, None] if bias.size else more
        parts = (jnp.split(x, kind.gates) for x in (gate.astype(inner), more))
        h, c, values = kind.step(_XP, *parts, h.astype(inner), c.astype(inner))
        h, values = h.astype(dtype), (jnp.concatenate(values) if values else gate[:0]).astype(dtype)
        now = (jnp.matmul(project, h) if project.size else h, c.astype(dtype), values)
        return now, now

    none = jnp.zeros((kind.saved * (gates.shape[1] // kind.gates), *h.shape[1:]), dtype)
    (_, _, last), (hidden, cells, saved) = lax.scan(step, (h, c, none), gates)
    if kind.saved:
        # XLA computes a step faster if it must store `values`, but without a gradient nothing reads them. So `hidden`
        # reads `last[0]`, which is at most 1, or NaN: the condition is never true, but XLA cannot infer that.
        hidden = jnp.where(last[0] > 2, 0, hidden)
    return hidden, cells, saved


@register_lowering("jtbridge::recurrent_backward")
def _recurrent_backward(
    by_hidden: jax.Array,
    by_cells: jax.Array,
    gates: jax.Array,
    h: jax.Array,
    c: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    project: jax.Array,
    hidden: jax.Array,
    cells: jax.Array,
    saved: jax.Array,
    cell: str,
) -> tuple[jax.Array, ...]:
    kind, dtype, inner = CELLS[cell], gates.dtype, opmath(gates.dtype)
    before_h, before_c = (jnp.concatenate([x[None], xs[:-1]]) for x, xs in ((h, hidden), (c, cells)))
    transposed, projected = weight.T, project.T

    def step(after: State, now: tuple[jax.Array, ...]) -> tuple[State, tuple[jax.Array, ...]]:
        by_h, by_c, values, *states = (x.astype(inner) for x in now)
        by_h, by_c = by_h + after[0], by_c + after[1]
        whole = by_h.astype(dtype)
        if project.size:
            by_h = jnp.matmul(projected, whole).astype(inner)
        parts = jnp.split(values, kind.saved) if kind.saved else ()
        by_gates, by_more, by_before, by_c = kind.slopes(_XP, by_h, by_c, parts, *states)
        by_gates = jnp.concatenate(by_gates).astype(dtype)
        by_more = by_gates if by_more is None else jnp.concatenate(by_more).astype(dtype)
        by_h = jnp.matmul(transposed, by_more).astype(inner)
        by_h = by_h if by_before is None else by_h + by_before
        # A stacked result that is not used, or that equals another one, makes the loop slower.
        others = (() if kind.adds_gates else (by_more,)) + ((whole,) if project.size else ())
        return (by_h, by_c), (by_gates, *others)

    none = (jnp.zeros(h.shape, inner), jnp.zeros(c.shape, inner))
    steps = (by_hidden, by_cells, saved, hidden, cells, before_h, before_c)
    (by_h, by_c), (by_gates, *others) = lax.scan(step, none, steps, reverse=True)
    by_more = by_gates if kind.adds_gates else others[0]
    by_bias = jnp.sum(by_more, axis=(0, 2), dtype=inner).astype(dtype) if bias.size else jnp.zeros_like(bias)
    by_project = jnp.zeros_like(project)
    if project.size:
        outputs = (jnp.split(saved, kind.saved, 1)[-1].astype(inner) * jnp.tanh(cells.astype(inner))).astype(dtype)
        by_project = _sum_over_steps(others[-1], outputs)
    return by_gates, by_h.astype(dtype), by_c.astype(dtype), _sum_over_steps(by_more, before_h), by_bias, by_project


@register_lowering("jtbridge::recurrent_double_backward")
def _recurrent_double_backward(
    seconds: Sequence[jax.Array], by_hidden: jax.Array, by_cells: jax.Array, *tensors_and_cell: Any
) -> tuple[jax.Array, ...]:
    *tensors, cell = tensors_and_cell

    def states(*tensors: jax.Array) -> State:
        return _recurrent(*tensors, cell)[:2]

    def gradients(by_hidden: jax.Array, by_cells: jax.Array, *tensors: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(states, *tensors)[1]((by_hidden, by_cells))

    return jax.vjp(gradients, by_hidden, by_cells, *tensors)[1](tuple(seconds))


def _sum_over_steps(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the sum over t of ``a[t] @ b[t].T``, as one product."""
    wide = jnp.swapaxes(a, 0, 1).reshape(a.shape[1], -1)
    return jnp.matmul(wide, jnp.swapaxes(b, 1, 2).reshape(-1, b.shape[1]))
