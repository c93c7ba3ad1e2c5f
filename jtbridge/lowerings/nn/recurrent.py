"""Recurrent layers: one scan over the time steps, with the large matrix products outside of the scan where possible.

`jtbridge.capture` defines the operators: `jtbridge::recurrent` for a layer, and `jtbridge::recurrent_backward` for the
gradient of a layer.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jtbridge.lowerings._common import opmath
from jtbridge.lowerings._registry import register_lowering

State = tuple[jax.Array, jax.Array]
Cell = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], State]


def _lstm(gates: jax.Array, more: jax.Array, h: jax.Array, c: jax.Array) -> State:
    del h
    i, f, g, o = jnp.split(gates + more, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru(gates: jax.Array, more: jax.Array, h: jax.Array, c: jax.Array) -> State:
    (r, z, n), (hr, hz, hn) = jnp.split(gates, 3, axis=-1), jnp.split(more, 3, axis=-1)
    n = jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn)
    return (h - n) * jax.nn.sigmoid(z + hz) + n, c


def _tanh(gates: jax.Array, more: jax.Array, h: jax.Array, c: jax.Array) -> State:
    del h
    return jnp.tanh(gates + more), c


def _relu(gates: jax.Array, more: jax.Array, h: jax.Array, c: jax.Array) -> State:
    del h
    return jax.nn.relu(gates + more), c


_CELLS: dict[str, Cell] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _tanh, "rnn_relu": _relu}


@register_lowering("jtbridge::recurrent")
def _recurrent(
    gates: jax.Array, h: jax.Array, c: jax.Array, weight: jax.Array, bias: jax.Array, cell: str
) -> tuple[jax.Array, jax.Array]:
    inner = opmath(gates.dtype)

    def step(state: State, gate: jax.Array) -> tuple[State, State]:
        h, c = state
        more = jnp.matmul(h, weight.T) + bias
        wide = (x.astype(inner) for x in (gate, more, h, c))
        new_h, new_c = _CELLS[cell](*wide)
        now = (new_h.astype(gates.dtype), new_c.astype(gates.dtype))
        return now, now

    return lax.scan(step, (h, c), gates)[1]


@register_lowering("jtbridge::recurrent_backward")
def _recurrent_backward(
    by_hidden: jax.Array,
    by_cells: jax.Array,
    gates: jax.Array,
    h: jax.Array,
    c: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    hidden: jax.Array,
    cells: jax.Array,
    cell: str,
) -> tuple[jax.Array, ...]:
    dtype, inner = gates.dtype, opmath(gates.dtype)
    before_h = jnp.concatenate([h[None], hidden[:-1]])
    before_c = jnp.concatenate([c[None], cells[:-1]])
    more = jnp.matmul(before_h, weight.T) + bias

    def step(after: State, now: tuple[jax.Array, ...]) -> tuple[State, tuple[jax.Array, jax.Array]]:
        by_h, by_c, *at = (x.astype(inner) for x in now)
        _, pullback = jax.vjp(_CELLS[cell], *at)
        by_gates, by_more, by_h, by_c = pullback((by_h + after[0], by_c + after[1]))
        by_h = by_h + jnp.matmul(by_more.astype(dtype), weight).astype(inner)
        return (by_h, by_c), (by_gates.astype(dtype), by_more.astype(dtype))

    none = (jnp.zeros(h.shape, inner), jnp.zeros(c.shape, inner))
    steps = (by_hidden, by_cells, gates, more, before_h, before_c)
    (by_h, by_c), (by_gates, by_more) = lax.scan(step, none, steps, reverse=True)
    by_weight = jnp.einsum("tbg,tbh->gh", by_more, before_h)
    return by_gates, by_h.astype(dtype), by_c.astype(dtype), by_weight, jnp.sum(by_more, axis=(0, 1), dtype=dtype)
