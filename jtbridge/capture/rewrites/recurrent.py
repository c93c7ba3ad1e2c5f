"""Recurrent layers as one operator each, so that graphs do not grow with the length of the sequences.

Torch's composite LSTM, GRU and RNN are traced step by step. `REPLACEMENTS` computes the same with two custom operators:
``jtbridge::recurrent`` runs one layer in one direction over a sequence, and ``jtbridge::recurrent_backward`` computes
its gradient. The gradient of the second operator is written in torch, step by step, so that derivatives of any order
are right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .packed import known_values, lengths_of, packed, padded

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _lstm_step(gates: torch.Tensor, more: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
    i, f, g, o = (gates + more).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_step(gates: torch.Tensor, more: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
    (r, z, n), (hr, hz, hn) = gates.chunk(3, dim=-1), more.chunk(3, dim=-1)
    n = (n + (r + hr).sigmoid() * hn).tanh()
    return (h - n) * (z + hz).sigmoid() + n, c


def _tanh_step(gates: torch.Tensor, more: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
    return (gates + more).tanh(), c


def _relu_step(gates: torch.Tensor, more: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
    return (gates + more).relu(), c


_STEPS: dict[str, Step] = {"lstm": _lstm_step, "gru": _gru_step, "rnn_tanh": _tanh_step, "rnn_relu": _relu_step}


def _unrolled(
    gates: torch.Tensor, h: torch.Tensor, c: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, cell: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `recurrent` step by step."""
    hidden, cells = [], []
    for gate in gates.unbind(0):
        h, c = _STEPS[cell](gate, torch.nn.functional.linear(h, weight, bias), h, c)
        hidden.append(h)
        cells.append(c)
    return torch.stack(hidden), torch.stack(cells)


def _lstm_slopes(by_h: Any, by_c: Any, gates: Any, more: Any, h: Any, c: Any) -> Any:
    i, f, g, o = (gates + more).chunk(4, dim=-1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    now = (f * c + i * g).tanh()
    by_c = by_c + by_h * o * (1 - now * now)
    by_i, by_f, by_g = by_c * g * i * (1 - i), by_c * c * f * (1 - f), by_c * i * (1 - g * g)
    by_gates = torch.cat([by_i, by_f, by_g, by_h * now * o * (1 - o)], dim=-1)
    return by_gates, by_gates, torch.zeros_like(by_h), by_c * f


def _gru_slopes(by_h: Any, by_c: Any, gates: Any, more: Any, h: Any, c: Any) -> Any:
    (r, z, n), (hr, hz, hn) = gates.chunk(3, dim=-1), more.chunk(3, dim=-1)
    r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
    n = (n + r * hn).tanh()
    by_n = by_h * (1 - z) * (1 - n * n)
    by_r, by_z = by_n * hn * r * (1 - r), by_h * (h - n) * z * (1 - z)
    return torch.cat([by_r, by_z, by_n], dim=-1), torch.cat([by_r, by_z, by_n * r], dim=-1), by_h * z, by_c


def _tanh_slopes(by_h: Any, by_c: Any, gates: Any, more: Any, h: Any, c: Any) -> Any:
    by_gates = by_h * (1 - (gates + more).tanh().square())
    return by_gates, by_gates, torch.zeros_like(by_h), by_c


def _relu_slopes(by_h: Any, by_c: Any, gates: Any, more: Any, h: Any, c: Any) -> Any:
    by_gates = torch.where(gates + more > 0, by_h, 0)
    return by_gates, by_gates, torch.zeros_like(by_h), by_c


# From the gradients by h and c after a step, and the step's arguments: the gradients by gates, more, h and c before it.
_SLOPES: dict[str, Callable[..., Any]] = {
    "lstm": _lstm_slopes,
    "gru": _gru_slopes,
    "rnn_tanh": _tanh_slopes,
    "rnn_relu": _relu_slopes,
}


@torch.library.custom_op("jtbridge::recurrent", mutates_args=())
def recurrent(
    gates: torch.Tensor, h: torch.Tensor, c: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, cell: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states (step, row, unit) of a layer, and its cell states, with 0 units in a layer without them.

    Args:
        gates: the contribution of the input to the gates, for each step.
        h, c: the states before the first step.
        weight, bias: the contribution of the hidden state `h` to the gates is ``linear(h, weight, bias)``.
        cell: `lstm`, `gru`, `rnn_tanh` or `rnn_relu`.
    """
    return _unrolled(gates, h, c, weight, bias, cell)


@recurrent.register_fake
def _(gates, h, c, weight, bias, cell):
    steps, rows = gates.shape[:2]
    return gates.new_empty(steps, rows, h.shape[-1]), gates.new_empty(steps, rows, c.shape[-1])


@torch.library.custom_op("jtbridge::recurrent_backward", mutates_args=())
def recurrent_backward(
    by_hidden: torch.Tensor,
    by_cells: torch.Tensor,
    gates: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    hidden: torch.Tensor,
    cells: torch.Tensor,
    cell: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `recurrent`, which returned `hidden` and `cells`, by gates, h, c, weight and bias."""
    before_h, before_c = torch.cat([h[None], hidden[:-1]]), torch.cat([c[None], cells[:-1]])
    more = torch.nn.functional.linear(before_h, weight, bias)
    by_gates, by_more = torch.empty_like(gates), torch.empty_like(gates)
    by_h, by_c = torch.zeros_like(h), torch.zeros_like(c)
    for t in reversed(range(gates.shape[0])):
        at = (gates[t], more[t], before_h[t], before_c[t])
        by_gates[t], by_more[t], by_h, by_c = _SLOPES[cell](by_h + by_hidden[t], by_c + by_cells[t], *at)
        by_h = by_h + by_more[t] @ weight
    by_weight = by_more.flatten(0, 1).T @ before_h.flatten(0, 1)
    return by_gates, by_h, by_c.clone(), by_weight, by_more.sum((0, 1))


@recurrent_backward.register_fake
def _(by_hidden, by_cells, gates, h, c, weight, bias, hidden, cells, cell):
    return tuple(x.new_empty(x.shape) for x in (gates, h, c, weight, bias))


def _followed(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor equal to `x` to differentiate by, in the graph of `x` if `x` requires a gradient."""
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.cell = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, by_hidden: torch.Tensor, by_cells: torch.Tensor) -> tuple[Any, ...]:
    return (*recurrent_backward(by_hidden, by_cells, *ctx.saved_tensors, ctx.cell), None)


recurrent.register_autograd(_backward, setup_context=_save)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.cell = inputs
    ctx.save_for_backward(*tensors[:7])


def _twice(ctx: Any, *seconds: torch.Tensor) -> tuple[Any, ...]:
    """Return the gradients of `recurrent_backward`.

    The hidden and cell states count as functions of the other inputs, from which the first gradients are recomputed.
    """
    with torch.enable_grad():
        leaves = [_followed(x) for x in ctx.saved_tensors]
        gates, h, c, weight, bias = leaves[2:]
        results = _unrolled(gates, h, c, weight, bias, ctx.cell)
        firsts = torch.autograd.grad(
            results, leaves[2:], leaves[:2], create_graph=True, allow_unused=True, materialize_grads=True
        )
        found = torch.autograd.grad(
            firsts, leaves, seconds, create_graph=True, allow_unused=True, materialize_grads=True
        )
    return (*found, None, None, None)


recurrent_backward.register_autograd(_twice, setup_context=_save_backward)


def _layer(
    x: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    params: Sequence[torch.Tensor],
    cell: str,
    reverse: bool,
    lengths: Sequence[int] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run one layer in one direction; return its hidden states, the last hidden state and the last cell state."""
    w_ih, w_hh, *biases = params
    b_ih, b_hh = biases or (None, w_hh.new_zeros(w_hh.shape[0]))
    gates = torch.nn.functional.linear(_reversed(x, lengths) if reverse else x, w_ih, b_ih)
    hidden, cells = recurrent(gates, h, c, w_hh, b_hh, cell)
    return _reversed(hidden, lengths) if reverse else hidden, _last(hidden, lengths), _last(cells, lengths)


def _reversed(x: torch.Tensor, lengths: Sequence[int] | None) -> torch.Tensor:
    """Reverse each sequence of ``x[step, row, ...]``; the steps after the end of a sequence stay in place."""
    if lengths is None:
        return x.flip(0)
    steps = [[n - 1 - t if t < n else t for n in lengths] for t in range(x.shape[0])]
    return x[torch.tensor(steps), torch.arange(len(lengths))]


def _last(x: torch.Tensor, lengths: Sequence[int] | None) -> torch.Tensor:
    """Return the last step of each sequence."""
    return x[-1] if lengths is None else x[torch.tensor(lengths) - 1, torch.arange(len(lengths))]


def _network(
    x: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    params: Sequence[torch.Tensor],
    how: tuple[str, bool, int, float, bool, bool, bool],
    lengths: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run all layers; return the hidden states of the last layer, and the last hidden and cell states of all layers.

    Args:
        x: the input, as torch takes it.
        h, c: the states before the first step, for each layer and direction.
        params: of all layers, in torch's order.
        how: the cell, then the options of the layers in torch's order.
        lengths: the number of steps that count in each row; None if all do.
    """
    cell, has_biases, num_layers, dropout, train, bidirectional, batch_first = how
    directions, each = 1 + bidirectional, 4 if has_biases else 2
    x = x.transpose(0, 1) if batch_first else x
    last_h, last_c = [], []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            i = layer * directions + direction
            own = params[i * each : (i + 1) * each]
            y, hn, cn = _layer(x, h[i], c[i], own, cell, direction == 1, lengths)
            outputs.append(y)
            last_h.append(hn)
            last_c.append(cn)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, train)
    return x.transpose(0, 1) if batch_first else x, torch.stack(last_h), torch.stack(last_c)


def _is_covered(x: Any, h: Any, params: Any, has_biases: bool, num_layers: int, bidirectional: bool, batch_first: bool):
    """Return whether `_network` computes the layers.

    It does not for projections, without steps, under autocast, and for arguments that torch refuses.
    """
    steps = x.shape[1 if batch_first else 0] if isinstance(x, torch.Tensor) and x.dim() == 3 else 0
    each = 4 if has_biases else 2
    return (
        steps > 0
        and isinstance(params, list | tuple)
        and len(params) == each * num_layers * (1 + bidirectional)
        and h.dim() == 3
        and h.shape == (num_layers * (1 + bidirectional), x.shape[0 if batch_first else 1], params[1].shape[-1])
        and len({t.dtype for t in (x, h, *params)}) == 1
        and x.is_floating_point()
        and not torch.is_autocast_enabled(x.device.type)
    )


def _lstm(x: Any, states: Any, params: Any, *how: Any) -> Any:
    if isinstance(states, torch.Tensor):  # a packed sequence: batch sizes, states, parameters
        return _of_packed(x, states, params[0], params[1], how[0], "lstm", how[1:])
    if len(how) != 6 or not isinstance(states, list | tuple) or len(states) != 2:
        return NotImplemented
    has_biases, num_layers, _, _, bidirectional, batch_first = how
    h, c = states
    if not _is_covered(x, h, params, has_biases, num_layers, bidirectional, batch_first) or c.shape != h.shape:
        return NotImplemented
    return _network(x, h, c, params, ("lstm", *how))


def _without_cell_state(cell: str) -> Callable[..., Any]:
    def run(x: Any, h: Any, params: Any, *how: Any) -> Any:
        if isinstance(params, torch.Tensor):  # a packed sequence: `h` is its batch sizes, `params` the states
            found = _of_packed(x, h, params, params[..., :0], how[0], cell, how[1:])
            return found if found is NotImplemented else found[:2]
        if len(how) != 6:
            return NotImplemented
        has_biases, num_layers, _, _, bidirectional, batch_first = how
        if not _is_covered(x, h, params, has_biases, num_layers, bidirectional, batch_first):
            return NotImplemented
        return _network(x, h, h[..., :0], params, (cell, *how))[:2]

    return run


def _of_packed(data: Any, sizes: Any, h: Any, c: Any, params: Any, cell: str, how: Sequence[Any]) -> Any:
    """Run the layers on a packed sequence, as a padded one: no step in a sequence depends on the padding."""
    counts = known_values(sizes)
    # Hidden states are computed in the padding as well, where they may overflow with relu, which spoils gradients.
    if counts is None or cell == "rnn_relu" or len(how) != 5 or data.dim() != 2:
        return NotImplemented
    has_biases, num_layers, _, _, bidirectional = how
    x = padded(data, counts, 0)
    if not _is_covered(x, h, params, has_biases, num_layers, bidirectional, False):
        return NotImplemented
    y, hn, cn = _network(x, h, c, params, (cell, *how, False), lengths_of(counts))
    return packed(y, counts), hn, cn


# For each function of torch, a replacement, which returns NotImplemented where torch's own function is to run.
REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    torch.lstm: _lstm,
    torch.gru: _without_cell_state("gru"),
    torch.rnn_tanh: _without_cell_state("rnn_tanh"),
    torch.rnn_relu: _without_cell_state("rnn_relu"),
}
