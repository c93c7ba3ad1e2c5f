"""The CTC loss as an operator whose shapes do not depend on the lengths of the targets, so that it can be traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.library.custom_op("jtbridge::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    longest: int,
    zero_infinity: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each sequence and the residual `log_alpha`; no target is longer than `longest`."""
    lengths = input_lengths.tolist(), target_lengths.tolist()
    loss, log_alpha = torch.ops.aten._ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)
    missing = 2 * longest + 1 - log_alpha.shape[2]
    return loss, torch.nn.functional.pad(log_alpha, (0, missing), value=-torch.inf)


@ctc_loss.register_fake
def _(log_probs, targets, input_lengths, target_lengths, blank, longest, zero_infinity):
    steps, rows, _ = log_probs.shape
    return log_probs.new_empty(rows), log_probs.new_empty(rows, steps, 2 * longest + 1)


@torch.library.custom_op("jtbridge::ctc_loss_backward", mutates_args=())
def ctc_loss_backward(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    loss: torch.Tensor,
    log_alpha: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """Return the gradient of `ctc_loss` with respect to `log_probs`. It has no derivative, as in torch."""
    inputs, lengths = input_lengths.tolist(), target_lengths.tolist()
    log_alpha = log_alpha[..., : 2 * max(lengths, default=0) + 1].contiguous()
    return torch.ops.aten._ctc_loss_backward(
        grad, log_probs, targets, inputs, lengths, loss, log_alpha, blank, zero_infinity
    )


@ctc_loss_backward.register_fake
def _(grad, log_probs, targets, input_lengths, target_lengths, loss, log_alpha, blank, zero_infinity):
    return log_probs.new_empty(log_probs.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.blank, _, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, by_loss: torch.Tensor, _: Any) -> tuple[Any, ...]:
    grad = ctc_loss_backward(by_loss, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return grad, None, None, None, None, None, None


ctc_loss.register_autograd(_backward, setup_context=_save)

_NONE, _MEAN, _SUM = 0, 1, 2  # torch's numbers of the reductions


def _ctc(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Any:
    if not _is_supported_loss(log_probs, targets, input_lengths, target_lengths):
        return NotImplemented
    batched = log_probs.dim() == 3
    rows = log_probs if batched else log_probs.unsqueeze(1)
    longest = targets.shape[-1]
    if targets.dim() == 1 and batched and not isinstance(target_lengths, torch.Tensor):
        longest = max(target_lengths, default=0)
    inputs, lengths = (_lengths_tensor(x, log_probs.device) for x in (input_lengths, target_lengths))
    loss, _ = ctc_loss(rows, targets, inputs, lengths, blank, longest, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == torch.inf, 0, loss)
    if reduction == _MEAN:
        return (loss / lengths.clamp_min(1).to(loss.dtype)).mean()
    if reduction == _NONE:
        return loss if batched else loss.squeeze(0)
    return loss.sum()


def _lengths_tensor(lengths: Any, device: torch.device) -> torch.Tensor:
    lengths = lengths if isinstance(lengths, torch.Tensor) else torch.tensor(lengths, dtype=torch.int64, device=device)
    return lengths.reshape(-1)


def _is_supported_loss(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any) -> bool:
    """Return whether `_ctc` can compute the loss; torch computes or refuses it for other arguments."""
    if not (isinstance(log_probs, torch.Tensor) and isinstance(targets, torch.Tensor)):
        return False
    if log_probs.dtype not in (torch.float32, torch.float64) or log_probs.dim() not in (2, 3) or not log_probs.numel():
        return False
    rows = log_probs.shape[1] if log_probs.dim() == 3 else 1
    if targets.dim() == 2 and targets.shape[0] != rows:
        return False
    both = ((input_lengths, log_probs.shape[0]), (target_lengths, targets.shape[-1] if targets.dim() else 0))
    return all(_are_lengths(lengths, rows, longest) for lengths, longest in both)


def _are_lengths(lengths: Any, count: int, longest: int) -> bool:
    if isinstance(lengths, torch.Tensor):
        return lengths.numel() == count and not lengths.is_floating_point() and not lengths.is_complex()
    return isinstance(lengths, list | tuple) and len(lengths) == count and all(0 <= n <= longest for n in lengths)


def _functional_ctc(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    number = {"none": _NONE, "mean": _MEAN, "sum": _SUM}.get(reduction)
    if number is None:
        return NotImplemented
    return _ctc(log_probs, targets, input_lengths, target_lengths, blank, number, zero_infinity)


# For each function of torch, a replacement, which returns NotImplemented where torch's own function is to run. Both
# functions are listed, because a mode does not see the inner call.
REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    torch.ctc_loss: _ctc,
    torch.nn.functional.ctc_loss: _functional_ctc,
}
