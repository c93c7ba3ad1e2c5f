"""Normalisations and some other functions written out in elementary operators, for derivatives beyond the first.

Torch's fused normalisations save the mean and the deviation of the forward. When their backward is differentiated more
than once, or is differentiated under torch.vmap, torch treats the saved values as constants, and the result is silently
wrong (torch 2.13: layer_norm, batch_norm in training, and instance_norm, which calls batch_norm; group_norm saves the
same values). For `cdist`, `pdist` and attention torch has a gradient only: no second derivative, and no forward mode.
The second derivative of `logcumsumexp` is NaN wherever its cotangent is 0. In a trace and under torch.vmap, that of
`det` is NaN where singular values are equal, as those of a rotation are. The forward derivative of `prelu` at 0 is not
the transpose of its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class ReplacementMode(TorchFunctionMode):
    """Mode that calls other functions in place of some functions of torch.

    Args:
        replacements: the function to call for each function of torch.
    """

    def __init__(self, replacements: Mapping[Callable[..., Any], Callable[..., Any]]):
        super().__init__()
        self._replacements = replacements

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self._replacements.get(func, func)(*args, **(kwargs or {}))


# The operators that this file replaces, by the end of their name in a graph.
FUSED = (
    *("layer_norm", "batch_norm", "group_norm", "_batch_norm_legit", "_batch_norm_with_update"),
    *("_cdist_forward", "_pdist_forward", "logcumsumexp", "linalg_det", "_prelu_kernel"),
    "_scaled_dot_product_flash_attention_for_cpu",
)


def _standardised(x: torch.Tensor, dims: tuple[int, ...], eps: float) -> torch.Tensor:
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + eps)


def _half_to_float32(x: torch.Tensor) -> torch.Tensor:
    """Convert half precision to float32, in which torch's fused kernels normalise too."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def scaled(x: torch.Tensor, weight: Any, bias: Any, shape: Sequence[int]) -> torch.Tensor:
    if weight is not None:
        x = x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def _layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: Any = None,
) -> torch.Tensor:
    del cudnn_enable
    dims = tuple(range(input.dim() - len(normalized_shape), input.dim()))
    out = scaled(_standardised(_half_to_float32(input), dims, eps), weight, bias, tuple(normalized_shape))
    return out.to(input.dtype)


def _group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: Any = None,
) -> torch.Tensor:
    del cudnn_enabled
    grouped = _half_to_float32(input).reshape(input.shape[0], num_groups, -1)
    out = _standardised(grouped, (2,), eps).reshape(input.shape)
    return scaled(out, weight, bias, channel_shape(input)).to(input.dtype)


def _functional_batch_norm(
    input: torch.Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    update_running_statistics(input, running_mean, running_var, momentum)
    dims = (0, *range(2, input.dim()))
    return scaled(_standardised(_half_to_float32(input), dims, eps), weight, bias, channel_shape(input)).to(input.dtype)


def update_running_statistics(input: torch.Tensor, running_mean: Any, running_var: Any, momentum: float) -> None:
    """Update the running statistics, unless they are None, by the mean and the variance of a batch.

    As in torch, the new statistics have no derivative by the batch. They have one by the old statistics.
    """
    if running_mean is not None:
        variance, mean = torch.var_mean(_half_to_float32(input.detach()), (0, *range(2, input.dim())))
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_(variance.to(running_var.dtype), momentum)


def in_order_of_torch(functional: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of ``torch.batch_norm``, made from one of ``F.batch_norm``, whose argument order differs."""

    def batch_norm(
        input: torch.Tensor,
        weight: Any,
        bias: Any,
        running_mean: Any,
        running_var: Any,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool = True,
    ) -> torch.Tensor:
        del cudnn_enabled
        return functional(input, running_mean, running_var, weight, bias, training, momentum, eps)

    return batch_norm


def _functional_instance_norm(
    input: torch.Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if not use_input_stats or running_mean is not None:  # running statistics: left to torch
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    dims = tuple(range(2, input.dim()))
    return scaled(_standardised(_half_to_float32(input), dims, eps), weight, bias, channel_shape(input)).to(input.dtype)


def _cdist(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: Any = None) -> torch.Tensor:
    del compute_mode
    return _distances(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


def _pairwise_distance(input: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return _distances(input[first] - input[second], p)


def _distances(differences: torch.Tensor, p: float) -> torch.Tensor:
    if not differences.shape[-1]:
        return differences.sum(-1)
    # Where two points coincide, the derivatives of a norm are NaN. Torch's gradient of a distance is 0 there, so the
    # higher derivatives are 0 too.
    apart = (differences != 0).any(-1)
    padded = torch.where(apart.unsqueeze(-1), differences, 1.0)
    distances = _largest_of_last_axis(padded.abs()) if p == math.inf else torch.linalg.vector_norm(padded, p, -1)
    return torch.where(apart, distances, 0.0)


def _largest_of_last_axis(x: torch.Tensor) -> torch.Tensor:
    """Return the largest values along the last axis. As in `cdist`, each of several equal ones has the whole gradient.

    `amax` shares the gradient among them.
    """
    largest = x.detach().amax(-1)
    chosen = torch.where((x == largest.unsqueeze(-1)) & x.isfinite(), x, 0.0)
    return largest + (chosen - chosen.detach()).sum(-1)


def _logcumsumexp(input: torch.Tensor, dim: int) -> torch.Tensor:
    """Compute logcumsumexp by doubling: combine the results over 1, 2, 4, ... elements by softplus.

    Softplus has all derivatives, also where the two values that it combines are equal. It is taken of the smaller value
    less the larger one, and added to the larger one, which keeps the digits of both.
    """
    if input.is_complex() or not input.is_floating_point() or not input.dim():
        return torch.logcumsumexp(input, dim)
    sums = _half_to_float32(input).movedim(dim, 0)
    reach = 1
    while reach < len(sums):
        later, earlier = sums[reach:], sums[:-reach]
        rises = later > earlier
        smaller, larger = torch.where(rises, earlier, later), torch.where(rises, later, earlier)
        infinite = larger.isinf() & ~smaller.isnan()
        gap = torch.where(infinite, 0.0, smaller - larger)  # two infinities would have a NaN gradient, even unused
        added = torch.where(infinite, larger, larger + F.softplus(gap))
        sums = torch.cat([sums[:reach], added])
        reach *= 2
    return sums.movedim(0, dim).to(input.dtype)


def _determinant(input: torch.Tensor) -> torch.Tensor:
    """Compute a determinant: of up to three rows by its polynomial, else by `slogdet`, or by singular values.

    Singular values are for a singular matrix, where `slogdet` has no derivative. They must differ from each other. Of a
    complex singular matrix the derivative is 0, as torch's gradient is.
    """
    size = input.shape[-1]
    if size == 1:
        return input[..., 0, 0]
    if size == 2:
        return input[..., 0, 0] * input[..., 1, 1] - input[..., 0, 1] * input[..., 1, 0]
    if size == 3:
        first, second, third = input.unbind(-2)
        return (first * torch.linalg.cross(second, third)).sum(-1)
    if size == 0:
        return torch.linalg.det(input)
    det = torch.linalg.det(input.detach())
    is_singular = det.abs() < 100 * torch.finfo(input.dtype).eps  # torch's own limit
    # Each of the two ways gets a matrix for which its derivatives are finite where the other way is chosen.
    regular = torch.where(is_singular[..., None, None], torch.eye(size, dtype=input.dtype, device=input.device), input)
    apart = torch.diag(1 + torch.arange(size, device=input.device) / size**2).to(input.dtype)
    sign, log = torch.linalg.slogdet(regular)
    relative = sign * sign.detach().conj() * (log - log.detach()).exp()  # 1, with the derivatives
    if input.is_complex():  # torch does not differentiate these singular vectors, whose phases are arbitrary
        return torch.where(is_singular, det, det * relative)
    u, values, vh = torch.linalg.svd(torch.where(is_singular[..., None, None], input, apart))
    of_singular = torch.linalg.slogdet(u)[0] * torch.linalg.slogdet(vh)[0] * values.prod(-1)
    return torch.where(is_singular, of_singular, det * relative)


def _leaky_by_weight(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    slopes = weight.reshape(channel_shape(input)) if input.dim() > 1 else weight
    return torch.where(input > 0, input, slopes * input)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if dropout_p:  # with dropout, torch itself uses elementary operators, and draws
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        allowed = attn_mask
        attn_mask = torch.zeros_like(allowed, dtype=query.dtype).masked_fill(~allowed, -math.inf)
    written_out = torch.ops.aten._scaled_dot_product_attention_math
    return written_out(query, key, value, attn_mask, 0.0, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]


# Of `F.multi_head_attention_forward`: the number of arguments before `training`, and the position of `dropout_p`.
_POSITIONS, _DROPOUT = 13, 10


def _multi_head_attention(*args: Any, need_weights: bool = True, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """Compute the weights even if they are not needed, because torch then uses elementary operators.

    No mode sees the functions that `F.multi_head_attention_forward` calls, so these cannot be replaced.
    """
    draws = len(args) != _POSITIONS or (args[_DROPOUT] and kwargs.get("training", True))
    if need_weights or draws:
        return F.multi_head_attention_forward(*args, need_weights=need_weights, **kwargs)
    return F.multi_head_attention_forward(*args, need_weights=True, **kwargs)[0], None


def channel_shape(input: torch.Tensor) -> tuple[int, ...]:
    return (1, -1, *(1,) * (input.dim() - 2))


COMPOSITE = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    F.batch_norm: _functional_batch_norm,
    torch.batch_norm: in_order_of_torch(_functional_batch_norm),
    F.instance_norm: _functional_instance_norm,
    torch.cdist: _cdist,
    torch.pdist: _pairwise_distance,
    F.pdist: _pairwise_distance,
    torch.logcumsumexp: _logcumsumexp,
    torch.Tensor.logcumsumexp: _logcumsumexp,
    F.prelu: _leaky_by_weight,
    torch.prelu: _leaky_by_weight,
    torch.det: _determinant,
    torch.Tensor.det: _determinant,
    torch.linalg.det: lambda A, *, out=None: torch.linalg.det(A, out=out) if out is not None else _determinant(A),
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head_attention,
}
# Functions for which torch has a gradient, but no forward mode and no second derivative. The forward derivative of such
# a function is computed from its replacement.
_ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
WITHOUT_FORWARD_MODE = {f: COMPOSITE[f] for f in _ATTENTION}
# Functions whose gradient torch cannot differentiate, or differentiates wrongly. A forward derivative by two reverse
# modes differentiates it.
WITHOUT_DOUBLE_BACKWARD = {
    f: COMPOSITE[f] for f in (torch.logcumsumexp, torch.Tensor.logcumsumexp, F.prelu, torch.prelu)
}
