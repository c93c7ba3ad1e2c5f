"""Torch's fused LSTM for float32 on a CPU as an operator whose gradient can be batched and differentiated again.

The gradient of torch's own operator can be neither batched nor differentiated, and the operator's fake kernel gives
oneDNN's residual no elements.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from jtbridge._compat import outside_modes
from jtbridge.core.second_gradients import as_variable, second_gradients

from .recurrent import REPLACEMENTS, by_rows, layer, using

_LSTM = 2  # oneDNN's number of the cell


@torch.library.custom_op("jtbridge::fused_lstm", mutates_args=())
def fused_lstm(
    x: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor,
    b_hh: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the hidden states (step, row, unit) of one layer, its last cell state, and the residual of oneDNN.

    Args:
        x: the input (step, row, feature).
        h, c: the states before the first step.
        w_ih, w_hh, b_ih, b_hh: the weights and biases.
    """
    operator: Any = torch.mkldnn_rnn_layer
    tensors = [t.contiguous() for t in (x, w_ih, w_hh, b_ih, b_hh, h, c)]
    with torch.enable_grad():  # otherwise oneDNN returns no residual; inside a custom operator, no graph is recorded
        hidden, _, last, workspace = operator(*tensors, False, [], _LSTM, h.shape[-1], 1, True, False, False, True)
    return hidden.contiguous(), last.reshape(c.shape), workspace


@fused_lstm.register_fake
def _(x, h, c, w_ih, w_hh, b_ih, b_hh):
    units = h.shape[-1]
    workspace = x.new_empty(_workspace(*x.shape, units), dtype=torch.uint8)
    return x.new_empty(*x.shape[:2], units), c.new_empty(c.shape), workspace


@functools.lru_cache(maxsize=256)
def _workspace(steps: int, rows: int, features: int, units: int) -> int:
    """Return the number of bytes of oneDNN's residual. Torch shows it only by running the layer."""
    with outside_modes():
        x, state = torch.zeros(steps, rows, features), torch.zeros(rows, units)
        weights = [torch.zeros(4 * units, *shape) for shape in ((features,), (units,), (), ())]
        return fused_lstm(x, state, state, *weights)[2].numel()


@torch.library.custom_op("jtbridge::fused_lstm_backward", mutates_args=())
def fused_lstm_backward(
    by_hidden: torch.Tensor,
    by_last: torch.Tensor,
    x: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor,
    b_hh: torch.Tensor,
    hidden: torch.Tensor,
    last: torch.Tensor,
    workspace: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `fused_lstm` with respect to its arguments."""
    tensors = [t.contiguous() for t in (x, w_ih, w_hh, b_ih, b_hh, h, c, hidden, hidden[-1], last, by_hidden)]
    by_x, by_ih, by_hh, by_bias, _, by_h, by_c = torch.ops.aten.mkldnn_rnn_layer_backward(
        *(*tensors, None, by_last.contiguous()),
        *(False, _LSTM, h.shape[-1], 1, True, True, False, [], False, workspace),
    )
    grads = by_x, by_h.reshape(h.shape), by_c.reshape(c.shape), by_ih, by_hh, by_bias
    return (*(g.contiguous() for g in grads), by_bias.clone())  # type: ignore[return-value]


@fused_lstm_backward.register_fake
def _(by_hidden, by_last, x, h, c, w_ih, w_hh, b_ih, b_hh, hidden, last, workspace):
    return tuple(t.new_empty(t.shape) for t in (x, h, c, w_ih, w_hh, b_ih, b_hh))


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, by_hidden: torch.Tensor, by_last: torch.Tensor, _: Any) -> tuple[torch.Tensor, ...]:
    return fused_lstm_backward(by_hidden, by_last, *ctx.saved_tensors)


fused_lstm.register_autograd(_backward, setup_context=_save)


def _save_backward(ctx: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:9])


def _double_backward(ctx: Any, *seconds: torch.Tensor) -> tuple[Any, ...]:
    """Return the gradients of `fused_lstm_backward`; results of `fused_lstm` are treated as functions of the rest."""
    with torch.enable_grad():
        leaves = [as_variable(t) for t in ctx.saved_tensors]
        x, h, c, *params = leaves[2:]
        hidden, cells = layer(x, h, c, params, "lstm")
        found = second_gradients((hidden, cells[-1]), leaves, seconds)
    return (*found, None, None, None)


fused_lstm_backward.register_autograd(_double_backward, setup_context=_save_backward)
fused_lstm.register_vmap(by_rows(fused_lstm))
fused_lstm_backward.register_vmap(by_rows(fused_lstm_backward))


def fused_layer(
    x: torch.Tensor, h: torch.Tensor, c: torch.Tensor, params: Sequence[torch.Tensor], cell: str
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Compute an LSTM layer by oneDNN's kernels; return None where oneDNN has no kernel for the layer.

    The results are those of :func:`layer`, but with the last cell state in place of all cell states.
    """
    fits = cell == "lstm" and len(params) in (2, 4) and x.dtype is torch.float32 and x.device.type == "cpu"
    if not fits or not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled or not x.numel():
        return None
    w_ih, w_hh, *biases = params
    if not biases:
        biases = [w_hh.new_zeros(len(w_hh)), w_hh.new_zeros(len(w_hh))]
    hidden, last, _ = fused_lstm(x, h, c, w_ih, w_hh, *biases)
    return hidden, last.unsqueeze(0)


def called(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute a call of torch's recurrent layers by :func:`fused_layer`; return NotImplemented for other calls."""
    ours = REPLACEMENTS.get(func)
    if ours is None or kwargs or len(args) != 9:
        return NotImplemented
    x, states, params = args[:3]
    is_packed = not isinstance(params, list | tuple) or (func is torch.lstm and isinstance(states, torch.Tensor))
    if is_packed or not isinstance(x, torch.Tensor) or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return NotImplemented
    with using(fused_layer):
        return ours(*args)
