"""One step of each recurrent cell and its derivative, in arithmetic that torch's tensors and JAX's arrays share.

The functions get a namespace `xp` with ``sigmoid``, ``tanh`` and ``where``: `torch`, or one of JAX's functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Cell:
    """A recurrent cell.

    Attributes:
        step: ``step(xp, gates, more, h, c) -> h, c, saved``: the states after a step, and values for its derivative.
            `gates` and `more` are the parts of the gates from the input and from the hidden state.
        slopes: ``slopes(xp, by_h, by_c, saved, h, c, before_h, before_c) -> by_gates, by_more, by_h, by_c``: the
            cotangents of the arguments of a step, from those of its results `h` and `c`. `by_more` is None if it equals
            `by_gates`. `by_h` is None if the step uses `h` only through the gates.
        gates: the number of gates.
        saved: the number of saved values.
        adds_gates: whether both parts of the gates are just added, so that one bias is enough.
    """

    step: Callable[..., tuple[Any, Any, Sequence[Any]]]
    slopes: Callable[..., tuple[Sequence[Any], Sequence[Any] | None, Any, Any]]
    gates: int
    saved: int
    adds_gates: bool


def _lstm_cell(xp: Any, gates: Sequence[Any], more: Sequence[Any], h: Any, c: Any) -> tuple[Any, Any, Sequence[Any]]:
    del h
    i, f, g, o = (a + b for a, b in zip(gates, more, strict=True))
    i, f, g, o = xp.sigmoid(i), xp.sigmoid(f), xp.tanh(g), xp.sigmoid(o)
    c = f * c + i * g
    return o * xp.tanh(c), c, (i, f, g, o)


def _lstm_slopes(xp: Any, by_h: Any, by_c: Any, saved: Sequence[Any], h: Any, c: Any, before_h: Any, before_c: Any):
    del h, before_h
    i, f, g, o = saved
    now = xp.tanh(c)
    by_c = by_c + by_h * o * (1 - now * now)
    by_i, by_f, by_g = by_c * g * i * (1 - i), by_c * before_c * f * (1 - f), by_c * i * (1 - g * g)
    return (by_i, by_f, by_g, by_h * now * o * (1 - o)), None, None, by_c * f


def _gru_cell(xp: Any, gates: Sequence[Any], more: Sequence[Any], h: Any, c: Any) -> tuple[Any, Any, Sequence[Any]]:
    (r, z, n), (hr, hz, hn) = gates, more
    r, z = xp.sigmoid(r + hr), xp.sigmoid(z + hz)
    n = xp.tanh(n + r * hn)
    return (h - n) * z + n, c, (r, z, n, hn)


def _gru_slopes(xp: Any, by_h: Any, by_c: Any, saved: Sequence[Any], h: Any, c: Any, before_h: Any, before_c: Any):
    del xp, h, c, before_c
    r, z, n, hn = saved
    by_n = by_h * (1 - z) * (1 - n * n)
    by_r, by_z = by_n * hn * r * (1 - r), by_h * (before_h - n) * z * (1 - z)
    return (by_r, by_z, by_n), (by_r, by_z, by_n * r), by_h * z, by_c


def _tanh_cell(xp: Any, gates: Sequence[Any], more: Sequence[Any], h: Any, c: Any) -> tuple[Any, Any, Sequence[Any]]:
    del h
    return xp.tanh(gates[0] + more[0]), c, ()


def _tanh_slopes(xp: Any, by_h: Any, by_c: Any, saved: Sequence[Any], h: Any, c: Any, before_h: Any, before_c: Any):
    del xp, saved, c, before_h, before_c
    return (by_h * (1 - h * h),), None, None, by_c


def _relu_cell(xp: Any, gates: Sequence[Any], more: Sequence[Any], h: Any, c: Any) -> tuple[Any, Any, Sequence[Any]]:
    del h
    gate = gates[0] + more[0]
    return xp.where(gate <= 0, 0, gate), c, ()


def _relu_slopes(xp: Any, by_h: Any, by_c: Any, saved: Sequence[Any], h: Any, c: Any, before_h: Any, before_c: Any):
    del saved, c, before_h, before_c
    return (xp.where(h <= 0, 0, by_h),), None, None, by_c


CELLS = {
    "lstm": Cell(_lstm_cell, _lstm_slopes, gates=4, saved=4, adds_gates=True),
    "gru": Cell(_gru_cell, _gru_slopes, gates=3, saved=4, adds_gates=False),
    "rnn_tanh": Cell(_tanh_cell, _tanh_slopes, gates=1, saved=0, adds_gates=True),
    "rnn_relu": Cell(_relu_cell, _relu_slopes, gates=1, saved=0, adds_gates=True),
}
