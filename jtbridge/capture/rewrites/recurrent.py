"""Recurrent layers as one operator each, so that graphs do not grow with the length of the sequences.

Torch's composite LSTM, GRU and RNN are traced step by step. `REPLACEMENTS` computes the same with three custom
operators: ``jtbridge::recurrent`` runs one layer in one direction over a sequence,
``jtbridge::recurrent_backward`` computes its gradient, and ``jtbridge::recurrent_double_backward`` the gradient of
that. The gradient of the last operator is torch code, step by step, which autograd can differentiate to any order.

The last axis of the operators' tensors is the rows: the product of a step is ``weight @ h``, with the weight as it is
in memory.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jtbridge._compat import recording_in_operators
from jtbridge.core.context_variables import assigned
from jtbridge.core.recurrent_cells import CELLS
from jtbridge.core.second_gradients import as_variable, differentiable_gradients, second_gradients

from .packed import known_integers, lengths_of, packed, pad_packed


def _unrolled(
    gates: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    project: torch.Tensor,
    cell: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `recurrent` step by step."""
    kind = CELLS[cell]
    column = bias.unsqueeze(1) if len(bias) else None
    hidden, cells, saved = [], [], [gates[:, :0]] if not kind.saved else []
    for gate in gates.unbind(0):
        more = weight @ h if column is None else torch.addmm(column, weight, h)
        h, c, values = kind.step(torch, gate.chunk(kind.gates), more.chunk(kind.gates), h, c)
        h = project @ h if project.numel() else h
        hidden.append(h)
        cells.append(c)
        if kind.saved:
            saved.append(torch.cat([*values]))
    return torch.stack(hidden), torch.stack(cells), torch.stack(saved) if kind.saved else saved[0].clone()


@torch.library.custom_op("jtbridge::recurrent", mutates_args=())
def recurrent(
    gates: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    project: torch.Tensor,
    cell: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the hidden states (step, unit, row) of a layer, its cell states, and values for `recurrent_backward`.

    The cell states of a cell without them have 0 units.

    Args:
        gates: the contribution of the input to the gates, for each step.
        h, c: the states before the first step.
        weight, bias: the contribution of the hidden state to the gates is ``weight @ h + bias``; without a bias, `bias`
            has no elements.
        project: the hidden state is ``project @ h``; without a projection, `project` has no elements.
        cell: `lstm`, `gru`, `rnn_tanh` or `rnn_relu`.
    """
    return _unrolled(gates, h, c, weight, bias, project, cell)


@recurrent.register_fake
def _(gates, h, c, weight, bias, project, cell):
    steps, width, rows = gates.shape
    units = width // CELLS[cell].gates
    shapes = h.shape[0], c.shape[0], CELLS[cell].saved * units
    return tuple(gates.new_empty(steps, n, rows) for n in shapes)


@torch.library.custom_op("jtbridge::recurrent_backward", mutates_args=())
def recurrent_backward(
    by_hidden: torch.Tensor,
    by_cells: torch.Tensor,
    gates: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    project: torch.Tensor,
    hidden: torch.Tensor,
    cells: torch.Tensor,
    saved: torch.Tensor,
    cell: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `recurrent` with respect to its tensors.

    Args:
        by_hidden, by_cells: the cotangents of the hidden and cell states.
        gates, h, c, weight, bias, project, cell: the arguments of `recurrent`.
        hidden, cells, saved: its results.
    """
    kind = CELLS[cell]
    before_h, before_c = torch.cat([h[None], hidden[:-1]]), torch.cat([c[None], cells[:-1]])
    values = saved.chunk(kind.saved, dim=1) if kind.saved else ()
    transposed, projected = weight.T.contiguous(), project.T.contiguous()
    all_gates, all_more, all_h = [], [], []
    by_h, by_c = torch.zeros_like(h), torch.zeros_like(c)
    for t in reversed(range(len(gates))):
        by_h, by_c = by_h + by_hidden[t], by_c + by_cells[t]
        if project.numel():
            all_h.append(by_h)
            by_h = projected @ by_h
        at = [value[t] for value in values], hidden[t], cells[t], before_h[t], before_c[t]
        by_gates, by_more, by_before, by_c = kind.slopes(torch, by_h, by_c, *at)
        all_gates.append(torch.cat([*by_gates]))
        all_more.append(all_gates[-1] if by_more is None else torch.cat([*by_more]))
        by_h = transposed @ all_more[-1]
        by_h = by_h if by_before is None else by_h + by_before
    by_gates, by_more = torch.stack(all_gates[::-1]), torch.stack(all_more[::-1])
    by_weight = _over_steps(by_more, before_h)
    by_bias = by_more.sum((0, 2)) if len(bias) else torch.zeros_like(bias)
    by_project = torch.zeros_like(project)
    if project.numel():
        outputs = saved.chunk(kind.saved, dim=1)[-1] * cells.tanh()
        by_project = _over_steps(torch.stack(all_h[::-1]), outputs)
    return by_gates, by_h, by_c.clone(), by_weight, by_bias, by_project


def _over_steps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the sum over t of ``a[t] @ b[t].T``, as one product."""
    return a.transpose(0, 1).flatten(1) @ b.transpose(1, 2).flatten(0, 1)


@recurrent_backward.register_fake
def _(by_hidden, by_cells, gates, h, c, weight, bias, project, hidden, cells, saved, cell):
    return tuple(x.new_empty(x.shape) for x in (gates, h, c, weight, bias, project))


@torch.library.custom_op("jtbridge::recurrent_double_backward", mutates_args=())
def recurrent_double_backward(
    seconds: Sequence[torch.Tensor],
    by_hidden: torch.Tensor,
    by_cells: torch.Tensor,
    gates: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    project: torch.Tensor,
    cell: str,
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]:
    """Return the gradients of `recurrent_backward` with respect to its tensors up to `project`.

    The hidden and cell states are treated as functions of the other arguments.

    Args:
        seconds: the cotangents of the results of `recurrent_backward`.
        by_hidden, by_cells, gates, h, c, weight, bias, project, cell: its arguments.
    """
    tensors = [x.detach() for x in (by_hidden, by_cells, gates, h, c, weight, bias, project)]
    with recording_in_operators(), torch.enable_grad():
        found = _by_autograd(seconds, tensors, cell)
    return tuple(x.detach().clone() for x in found)  # type: ignore[return-value]


@recurrent_double_backward.register_fake
def _(seconds, by_hidden, by_cells, gates, h, c, weight, bias, project, cell):
    return tuple(x.new_empty(x.shape) for x in (by_hidden, by_cells, gates, h, c, weight, bias, project))


def _by_autograd(
    seconds: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], cell: str
) -> tuple[torch.Tensor, ...]:
    """Compute `recurrent_double_backward` step by step, as torch code that autograd can differentiate."""
    leaves = [as_variable(x) for x in tensors]
    hidden, cells, _ = _unrolled(*leaves[2:], cell=cell)
    return second_gradients((hidden, cells), leaves, seconds)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.cell = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, by_hidden: torch.Tensor, by_cells: torch.Tensor, _: Any) -> tuple[Any, ...]:
    return (*recurrent_backward(by_hidden, by_cells, *ctx.saved_tensors, ctx.cell), None)


recurrent.register_autograd(_backward, setup_context=_save)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.cell = inputs[-1]
    ctx.save_for_backward(*inputs[:8])


def _double_backward(ctx: Any, *seconds: torch.Tensor) -> tuple[Any, ...]:
    return (*recurrent_double_backward(list(seconds), *ctx.saved_tensors, ctx.cell), None, None, None, None)


recurrent_backward.register_autograd(_double_backward, setup_context=_save_backward)


def _save_double_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    seconds, *tensors, ctx.cell = inputs
    ctx.save_for_backward(*seconds, *tensors)


def _triple_backward(ctx: Any, *thirds: torch.Tensor) -> tuple[Any, ...]:
    with torch.enable_grad():
        leaves = [as_variable(x) for x in ctx.saved_tensors]
        results = _by_autograd(leaves[:6], leaves[6:], ctx.cell)
        found = differentiable_gradients(results, leaves, thirds)
    return list(found[:6]), *found[6:], None


recurrent_double_backward.register_autograd(_triple_backward, setup_context=_save_double_backward)


def layer(
    x: torch.Tensor, h: torch.Tensor, c: torch.Tensor, params: Sequence[torch.Tensor], cell: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one layer over the steps; return its hidden states and its cell states (step, row, unit).

    Args:
        x: the input (step, row, feature).
        h, c: the states before the first step.
        params: the weights for the input and the hidden state, biases of both or none, and the projection or none.
        cell: the cell.
    """
    w_ih, w_hh, *others = params
    *biases, project = others if len(others) % 2 else (*others, x.new_empty(0, 0))
    gates = w_ih @ x.flatten(0, 1).T
    bias = x.new_empty(0)
    if biases and CELLS[cell].adds_gates:
        bias = biases[0] + biases[1]
    elif biases:
        gates, bias = gates + biases[0].unsqueeze(1), biases[1]
    gates = gates.unflatten(1, x.shape[:2]).transpose(0, 1)
    hidden, cells, _ = recurrent(gates, h.T, c.T, w_hh, bias, project, cell)
    return hidden.transpose(1, 2), cells.transpose(1, 2)


def by_rows(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a batching rule of an operator of tensors and static values: the rows run one after another."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        rows = [
            operator(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        results = tuple(torch.stack(result) for result in zip(*rows, strict=True))
        return results, (0,) * len(results)

    return rule


recurrent.register_vmap(by_rows(recurrent))
recurrent_backward.register_vmap(by_rows(recurrent_backward))

Layer = Callable[..., tuple[torch.Tensor, torch.Tensor] | None]
_FUSED: contextvars.ContextVar[Layer | None] = contextvars.ContextVar("fused_layer", default=None)


def using(fused: Layer) -> contextlib.AbstractContextManager[None]:
    """Run layers inside the block by `fused`, and by :func:`layer` where `fused` returns None.

    `fused` is called like :func:`layer`. It may return only the last cell state in place of all cell states.
    """
    return assigned((_FUSED, fused))


def _direction(
    x: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    params: Sequence[torch.Tensor],
    cell: str,
    reverse: bool,
    lengths: Sequence[int] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run one layer in one direction; return its hidden states, the last hidden state and the last cell state."""
    fused = _FUSED.get() if lengths is None else None
    inputs = _reversed(x, lengths) if reverse else x
    found = None if fused is None else fused(inputs, h, c, params, cell)
    hidden, cells = layer(inputs, h, c, params, cell) if found is None else found
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
        params: the parameters of all layers, in torch's order.
        how: the cell, then the options of the layers in torch's order.
        lengths: the number of steps before the padding in each row; None if there is no padding.
    """
    cell, _, num_layers, dropout, train, bidirectional, batch_first = how
    directions = 1 + bidirectional
    each = len(params) // (num_layers * directions)
    x = x.transpose(0, 1) if batch_first else x
    last_h, last_c = [], []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            i = layer * directions + direction
            own = params[i * each : (i + 1) * each]
            y, hn, cn = _direction(x, h[i], c[i], own, cell, direction == 1, lengths)
            outputs.append(y)
            last_h.append(hn)
            last_c.append(cn)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, train)
    if not bidirectional:
        x = x.clone()  # the user's code may write to the result, and the gradient reads the hidden states
    return x.transpose(0, 1) if batch_first else x, torch.stack(last_h), torch.stack(last_c)


def _is_supported_network(
    x: Any, h: Any, c: Any, params: Any, has_biases: bool, num_layers: int, bidirectional: bool, batch_first: bool
) -> bool:
    """Return whether `_network` can compute the layers.

    It cannot for sequences of length 0, under autocast, or for arguments that torch refuses.
    """
    steps = x.shape[1 if batch_first else 0] if isinstance(x, torch.Tensor) and x.dim() == 3 else 0
    if steps == 0 or not isinstance(params, list | tuple) or h.dim() != 3 or c.dim() != 3:
        return False
    count, rows = num_layers * (1 + bidirectional), x.shape[0 if batch_first else 1]
    is_projected = 0 < c.shape[-1] != h.shape[-1]
    return (
        len(params) == ((4 if has_biases else 2) + is_projected) * count
        and h.shape == (count, rows, params[1].shape[-1])
        and c.shape in ((count, rows, 0), (count, rows, params[1].shape[0] // CELLS["lstm"].gates))
        and len({t.dtype for t in (x, h, c, *params)}) == 1
        and x.is_floating_point()
        and not torch.is_autocast_enabled(x.device.type)
    )


def _is_cast_by_autocast(x: Any, h: torch.Tensor, c: torch.Tensor) -> bool:
    """Return whether torch computes an LSTM by oneDNN in autocast's dtype.

    Without oneDNN, and with projections, autocast applies to each operator of the LSTM.
    """
    return (
        isinstance(x, torch.Tensor)
        and torch.is_autocast_enabled("cpu")
        and x.device.type == "cpu"
        and x.dtype is torch.float32
        and x.numel() > 0
        and h.shape == c.shape
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )


def _lstm(x: Any, states: Any, params: Any, *how: Any) -> Any:
    if isinstance(states, torch.Tensor):  # a packed sequence: batch sizes, states, parameters
        return _of_packed(x, states, params[0], params[1], how[0], "lstm", how[1:])
    if len(how) != 6 or not isinstance(states, list | tuple) or len(states) != 2:
        return NotImplemented
    has_biases, num_layers, _, _, bidirectional, batch_first = how
    h, c = states
    if _is_cast_by_autocast(x, h, c):
        dtype = torch.get_autocast_dtype("cpu")
        cast = [t.to(dtype) for t in (x, h, c, *params)]
        with torch.autocast("cpu", enabled=False):
            return _lstm(cast[0], cast[1:3], cast[3:], *how)
    if not _is_supported_network(x, h, c, params, has_biases, num_layers, bidirectional, batch_first):
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
        if not _is_supported_network(x, h, h[..., :0], params, has_biases, num_layers, bidirectional, batch_first):
            return NotImplemented
        return _network(x, h, h[..., :0], params, (cell, *how))[:2]

    return run


def _of_packed(data: Any, sizes: Any, h: Any, c: Any, params: Any, cell: str, how: Sequence[Any]) -> Any:
    """Run the layers on a packed sequence by padding it: no step in a sequence depends on the padding."""
    counts = known_integers(sizes)
    # Hidden states are computed in the padding as well, where they may overflow with relu, which spoils gradients.
    if counts is None or cell == "rnn_relu" or len(how) != 5 or data.dim() != 2:
        return NotImplemented
    has_biases, num_layers, _, _, bidirectional = how
    x = pad_packed(data, counts, 0)
    if not _is_supported_network(x, h, c, params, has_biases, num_layers, bidirectional, False):
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
