"""The operators that random programs are written with.

Each is a function of a :class:`~tests.fuzz.programs.Writer` that writes one statement, or raises `NoChoice`. Torch
itself decides whether a statement is valid: one that it refuses is dropped, so an operator may choose freely.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .programs import NoChoice, Writer

Operator = Callable[[Writer], None]
OPERATORS: list[Operator] = []
WEIGHTS: list[float] = []


def operator(weight: float) -> Callable[[Operator], Operator]:
    """Add an operator, chosen with the given weight."""

    def add(function: Operator) -> Operator:
        OPERATORS.append(function)
        WEIGHTS.append(weight)
        return function

    return add


# A float variable {x}; {d} is one of its dimensions, {n} a literal. The guards say where there is a kink or a pole.
_UNARY: list[tuple[str, ...]] = [
    *[
        (f"torch.{name}({{x}})",)
        for name in (
            "sin",
            "cos",
            "tanh",
            "sigmoid",
            "atan",
            "erf",
            "square",
            "neg",
            "asinh",
            "sinc",
            "erfc",
            "positive",
            "special.i0e",
            "special.expit",
            "deg2rad",
            "clone",
            "exp2",
            "special.log_ndtr",
            "special.ndtr",
        )
    ],
    *[
        (f"F.{name}({{x}})",)
        for name in (
            "softplus",
            "gelu",
            "silu",
            "mish",
            "softsign",
            "logsigmoid",
            "tanhshrink",
        )
    ],
    *[(f"torch.{name}({{x}})", "below({x}, 3)") for name in ("exp", "expm1", "sinh", "cosh", "i0")],
    *[
        (f"torch.{name}({{x}})", "above({x}, 0.1)")
        for name in (
            "log",
            "log2",
            "log10",
            "sqrt",
            "rsqrt",
            "lgamma",
            "digamma",
        )
    ],
    *[(f"torch.{name}({{x}})", "away({x}, 0)") for name in ("relu", "abs", "sign", "sgn")],
    *[(f"torch.{name}({{x}})", "unrounded({x})") for name in ("floor", "ceil", "round", "trunc", "frac")],
    *[(f"torch.{name}({{x}})", "below({x}, 0.9)") for name in ("asin", "acos", "atanh", "erfinv", "tan")],
    # Where it is 0 the second derivative of torch is NaN, and so is forward mode by two reverse modes.
    ("torch.sinc({x})", "away({x}, 0)"),
    ("torch.log1p({x})", "above({x}, -0.8)"),
    ("torch.reciprocal({x})", "above({x}.abs(), 0.2)"),
    ("torch.logit({x}, 0.05)", "away({x}, 0, 0.05, 0.95, 1)", "below({x}, 3)"),  # as sinc, at 0 and 1
    ("F.gelu({x}, approximate='tanh')",),
    ("F.elu({x}, {p})", "away({x}, 0)"),
    ("F.celu({x}, {p})", "away({x}, 0)"),
    ("F.selu({x})", "away({x}, 0)"),
    ("F.leaky_relu({x}, {p})", "away({x}, 0)"),
    ("F.hardtanh({x}, -0.7, {p})", "away({x}, -0.7, {p})"),
    ("F.hardswish({x})", "away({x}, -3, 3)"),
    ("F.hardsigmoid({x})", "away({x}, -3, 3)"),
    ("F.relu6({x})", "away({x}, 0, 6)"),
    ("F.softshrink({x}, {p})", "away({x}, {p}, -{p})"),
    ("F.hardshrink({x}, {p})", "away({x}, {p}, -{p})"),
    ("F.threshold({x}, {n}, 0.3)", "away({x}, {n})"),
    ("torch.clamp({x}, {n})", "away({x}, {n})"),
    ("torch.clamp({x}, max={n})", "away({x}, {n})"),
    ("torch.clamp({x}, -0.5, {p})", "away({x}, -0.5, {p})"),
    ("torch.nan_to_num({x}, 0.5)",),
    ("torch.nan_to_num(torch.log({x}), nan=0.25, neginf=-1.0)", "away({x}, 0)"),
    ("{x} + {n}",),
    ("{n} - {x}",),
    ("{x} * {n}",),
    ("{x} / {p}",),
    ("{x} ** 2",),
    ("{x} ** 3",),
    ("-{x}",),
    ("{n} / {x}", "above({x}.abs(), 0.2)"),
    ("{p} ** {x}", "below({x}, 4)"),
    ("{x} ** {n}", "above({x}, 0.1)"),
    ("{x} ** -1", "above({x}.abs(), 0.2)"),
    ("torch.pow({x}, 4)", "below({x}, 2.5)"),
    ("{x} // {p}", "unrounded({x} / {p})"),
    ("{x} % {p}", "unrounded({x} / {p})"),
    ("torch.fmod({x}, {p})", "unrounded({x} / {p})"),
    ("torch.where({x} > {n}, {x}, -0.5 * {x})", "away({x}, {n})"),
    ("torch.where({x} > {n}, {x}.detach(), {x} * 2)", "away({x}, {n})"),
    ("torch.special.xlog1py({x}, {p})",),
    ("torch.xlogy({x}, {p})",),
    ("torch.mvlgamma({x}, 1)", "above({x}, 0.2)"),
    ("torch.polygamma(1, {x})", "above({x}, 0.3)"),
    ("torch.special.zeta({x}.detach(), 2.0)", "above({x}, 1.5)"),
    ("torch.special.bessel_j0({x}.detach())",),
    ("{x}.detach()",),
    ("{x}.double()",),
    ("{x}.to({x}.dtype)",),
    ("{x}.contiguous()",),
    # Reductions.
    ("{x}.sum()",),
    ("{x}.mean()",),
    ("{x}.sum({d})",),
    ("{x}.mean({d}, keepdim=True)",),
    ("{x}.sum({d}, True)",),
    ("{x}.prod({d})",),
    ("{x}.prod()",),
    ("torch.logsumexp({x}, {d})",),
    ("torch.nansum({x}, {d})",),
    ("{x}.amax({d})", "distinct({x}, {d})"),
    ("{x}.amin({d}, True)", "distinct({x}, {d})"),
    ("{x}.max()", "distinct({x})"),
    ("{x}.min()", "distinct({x})"),
    ("{x}.max({d}).values", "distinct({x}, {d})"),
    ("{x}.min({d}, keepdim=True)[0]", "distinct({x}, {d})"),
    ("{x}.median({d}).values", "distinct({x}, {d})"),
    ("{x}.median()", "distinct({x})"),
    ("{x}.nanmedian()", "distinct({x})"),
    ("{x}.kthvalue(2, {d})[0]", "distinct({x}, {d})"),
    ("{x}.quantile(0.3, {d})", "distinct({x}, {d})"),
    ("{x}.quantile(0.6)", "distinct({x})"),
    ("{x}.var({d})", "spread({x}, {d})"),
    ("{x}.std({d}, keepdim=True)", "spread({x}, {d})"),
    ("{x}.var()", "spread({x})"),
    ("{x}.std(unbiased=False)", "spread({x})"),
    ("torch.var_mean({x}, {d})[1]", "spread({x}, {d})"),
    ("{x}.norm()", "above({x}.norm(), 0.1)"),
    ("{x}.norm(dim={d})", "above({x}.norm(dim={d}), 0.1)"),
    ("{x}.norm(1, {d})", "away({x}, 0)"),
    ("torch.linalg.vector_norm({x}, 3, {d})", "away({x}, 0)"),
    ("torch.linalg.vector_norm({x}, float('inf'), {d})", "distinct({x}.abs(), {d})"),
    ("{x}.argmax({d})", "distinct({x}, {d})"),
    ("{x}.argmin()", "distinct({x})"),
    ("{x}.count_nonzero({d})", "away({x}, 0)"),
    ("torch.cumsum({x}, {d})",),
    ("torch.cumprod({x}, {d})", "away({x}, 0)"),
    ("torch.logcumsumexp({x}, {d})",),
    ("torch.cummax({x}, {d}).values", "distinct({x}, {d})"),
    ("torch.cummin({x}, {d})[0]", "distinct({x}, {d})"),
    ("torch.diff({x}, dim={d})",),
    ("torch.trapezoid({x}, dim={d})",),
    ("torch.cumulative_trapezoid({x}, dim={d})",),
    ("torch.renorm({x}, 2, {d}, 0.7)", "apart(torch.linalg.vector_norm({x}.transpose(0, {d}).flatten(1), dim=1), 0.7)"),
    # Sorting.
    ("{x}.sort({d}).values", "distinct({x}, {d})"),
    ("{x}.sort({d}, descending=True)[0]", "distinct({x}, {d})"),
    ("{x}.argsort({d})", "distinct({x}, {d})"),
    ("torch.msort({x})", "distinct({x}, 0)"),
    ("{x}.topk(2, {d}).values", "distinct({x}, {d})"),
    ("{x}.topk(2, {d}, largest=False)[1]", "distinct({x}, {d})"),
    ("{x}.flatten().sort().values", "distinct({x})"),
    # Views and shapes.
    ("{x}.T.mT",),
    ("{x}.mT",),
    ("{x}.transpose(0, {d})",),
    ("{x}.permute(*reversed(range({x}.ndim)))",),
    ("{x}.reshape(-1)",),
    ("{x}.flatten()",),
    ("{x}.unsqueeze({d})",),
    ("{x}.squeeze()",),
    ("{x}.unsqueeze(0)",),
    ("{x}.squeeze({d})",),
    ("{x}.movedim(0, {d})",),
    ("{x}.unflatten({d}, (1, -1))",),
    ("{x}[None]",),
    ("{x}[..., None]",),
    ("{x}[0]",),
    ("{x}[-1]",),
    ("{x}[1:]",),
    ("{x}[:-1]",),
    ("{x}[::2]",),
    ("{x}[..., 0]",),
    ("{x}[..., 1:]",),
    ("{x}[..., ::2]",),
    ("{x}[:, 1]",),
    ("{x}[:, -2:]",),
    ("{x}[:, None]",),
    ("{x}[..., -1:]",),
    ("{x}.select({d}, 0)",),
    ("{x}.narrow({d}, 0, 2)",),
    ("{x}.chunk(2, {d})[-1]",),
    ("{x}.split(2, {d})[0]",),
    ("{x}.unbind({d})[-1]",),
    ("{x}.tensor_split(2, {d})[0]",),
    ("{x}.diagonal()",),
    ("{x}.diagonal(1, 0, -1)",),
    ("{x}.flip({d})",),
    ("{x}.fliplr()",),
    ("{x}.roll(1, {d})",),
    ("{x}.roll(2)",),
    ("{x}.rot90()",),
    ("{x}.expand(2, *{x}.shape)",),
    ("{x}.repeat(2, *[1] * {x}.ndim)",),
    ("{x}.tile(2)",),
    ("{x}.repeat_interleave(2, {d})",),
    ("{x}.unfold({d}, 2, 1)",),
    ("torch.atleast_2d({x})",),
    ("torch.ravel({x})",),
    ("{x}.as_strided((2, 2), (1, 1)) * 1",),  # torch does not define what writes to a view that overlaps itself do
    ("{x}.clone().view(-1)",),
    ("{x}.view_as({x})",),
    ("{x}.swapaxes(0, {d})",),
    ("torch.stack({x}.unbind({d}), -1)",),
    ("torch.cat({x}.split(1, {d}), 0)",),
    ("torch.cat([{x}, {x} * 2], {d})",),
    ("torch.stack([{x}, -{x}], {d})",),
    ("torch.block_diag({x}, {x})",),
    ("torch.tril({x})",),
    ("torch.triu({x}, 1)",),
    ("torch.tril({x}, -1) + {x}.mT",),
    ("torch.diag_embed({x})",),
    ("torch.diag({x})",),
    ("torch.trace({x})",),
    ("torch.vander({x}, 3)", "below({x}, 3)"),
    ("torch.meshgrid({x}, {x}, indexing='ij')[1]",),
    ("torch.combinations({x})",),
    ("torch.cartesian_prod({x}, {x})",),
    ("torch.zeros_like({x}) + {x}.sum()",),
    ("torch.full_like({x}, {n}) * {x}",),
    ("{x}.new_ones(3) * {x}.mean()",),
    # Products.
    ("{x} @ {x}.mT",),
    ("{x}.mT @ {x}",),
    ("torch.outer({x}, {x})",),
    ("torch.kron({x}, {x})",),
    ("{x}.dot({x})",),
    ("torch.einsum('ij,kj->ik', {x}, {x})",),
    ("torch.einsum('ij->ji', {x})",),
    ("torch.einsum('ii->i', {x})",),
    ("torch.einsum('...i,...i->...', {x}, {x})",),
    ("torch.einsum('bij,bkj->bik', {x}, {x})",),
    ("torch.tensordot({x}, {x}, 1)",),
    ("torch.linalg.multi_dot([{x}, {x}.T, {x}])",),
    ("torch.matrix_power({x}, 3)", "below({x}, 1.5)"),
    ("torch.cdist({x}, {x} + 3)",),
    ("torch.cov({x})",),
    ("torch.corrcoef({x})", "spread({x}, -1)"),
    ("torch.pdist({x})", "distinct({x})"),
    ("torch.linalg.cross({x}, {x}.flip(-1) * {n})",),
    # Networks.
    ("F.softmax({x}, {d})",),
    ("F.log_softmax({x}, {d})",),
    ("F.softmin({x}, {d})",),
    ("torch.softmax({x}.masked_fill({x} < {n}, float('-inf')), {d})", "away({x}, {n})", "({x}.amax({d}) > {n}).all()"),
    ("F.normalize({x}, dim={d})", "above({x}.norm(dim={d}), 0.2)"),
    ("F.layer_norm({x}, {x}.shape[-1:])", "spread({x}, -1)"),
    ("F.rms_norm({x}, {x}.shape[-1:], eps=1e-3)",),
    ("F.layer_norm({x}, {x}.shape[1:], eps=1e-3)", "spread({x}, *range(1, {x}.ndim))"),
    ("F.group_norm({x}, 1)", "spread({x}, *range(1, {x}.ndim))"),
    ("F.batch_norm({x}, None, None, training=True)", "spread({x}, 0, *range(2, {x}.ndim))"),
    ("F.instance_norm({x})", "spread({x}, *range(2, {x}.ndim))"),
    ("F.local_response_norm({x}, 2)",),
    ("F.pad({x}, (1, 2))",),
    ("F.pad({x}, (-1, 1), value={n})",),
    ("F.pad({x}, (1, 1), mode='reflect')",),
    ("F.pad({x}, (1, 0), mode='replicate')",),
    ("F.pad({x}, (0, 1), mode='circular')",),
    ("F.pad({x}, (0, 1, 1, 0))",),
    ("F.avg_pool1d({x}, 2)",),
    ("F.avg_pool1d({x}, 3, 1, 1, count_include_pad=False)",),
    ("F.avg_pool2d({x}, 2, 1)",),
    ("F.max_pool1d({x}, 2)", "distinct({x}, -1)"),
    ("F.max_pool2d({x}, 2, 1)", "distinct({x})"),
    ("F.max_pool1d({x}, 2, 1, return_indices=True)[1]", "distinct({x}, -1)"),
    ("F.adaptive_avg_pool1d({x}, 2)",),
    ("F.adaptive_max_pool1d({x}, 2)", "distinct({x}, -1)"),
    ("F.adaptive_avg_pool2d({x}, (2, 1))",),
    ("F.lp_pool1d({x}.abs() + 0.5, 2, 2)", "away({x}, 0)"),
    ("F.interpolate({x}, scale_factor=2, mode='linear')",),
    ("F.interpolate({x}, 3)",),
    ("F.interpolate({x}, 4, mode='linear', align_corners=True)",),
    ("F.interpolate({x}, (3, 3), mode='bilinear')",),
    ("F.interpolate({x}, (3, 2), mode='bicubic', align_corners=True)",),
    ("F.unfold({x}, (2, 1))",),
    ("F.glu({x}, {d})",),
    ("F.pixel_shuffle({x}, 2)",),
    ("F.channel_shuffle({x}, 2)",),
    ("F.conv1d({x}, {x}[:2].detach().sin()[..., :2])",),
    ("F.scaled_dot_product_attention({x}, {x} * {n}, {x}.flip(-1))",),
    ("F.scaled_dot_product_attention({x}, {x}, {x} + 1, is_causal=True)",),
    ("torch.fft.fft({x}, dim={d}).real",),
    (
        "torch.fft.rfft({x}, dim={d}).abs().square()",
        "distinct({x})",
    ),
    ("torch.fft.irfft(torch.fft.rfft({x}, dim={d}) * 0.5, n={x}.shape[{d}], dim={d})",),
    ("torch.fft.fftshift({x})",),
    ("torch.fft.rfft({x})",),
    ("torch.fft.ifft({x}, norm='ortho')",),
    ("torch.fft.fft2({x})",),
    ("torch.fft.hfft({x})",),
    ("torch.complex({x}, {x} * {n})",),
    ("torch.polar({x}.exp(), {x})", "below({x}, 2)"),
    ("{x} * (1 + 2j)",),
    ("torch.view_as_complex(torch.stack([{x}, {x} + 1], -1))",),
    # Torch's own transformations, and gradients inside.
    ("torch.func.grad(lambda u: (u.sin() * u).sum())({x})",),
    ("torch.func.vmap(lambda u: u.cumsum(0) * u.sum())({x})",),
    ("torch.func.jvp(lambda u: u.exp().sin(), ({x},), ({x} * 0.5,))[1]", "below({x}, 2)"),
    ("torch.func.vjp(lambda u: u ** 3, {x})[1]({x})[0]", "below({x}, 2)"),
    ("torch.func.jacrev(lambda u: u.square().sum(-1))({x})",),
    ("torch.func.jacfwd(lambda u: u * u.sum())({x})",),
    ("torch.func.vmap(torch.func.grad(lambda u: u.tanh().prod()))({x})",),
    ("torch.func.hessian(lambda u: (u ** 3).sum())({x})", "below({x}, 2)"),
    ("torch.utils.checkpoint.checkpoint(lambda u: u.sin() * u, {x}, use_reentrant=False)",),
    # Comparisons.
    ("{x} > {n}", "away({x}, {n})"),
    ("{x} <= {n}", "away({x}, {n})"),
    ("torch.isfinite({x})",),
    ("({x} > 0).any({d})", "away({x}, 0)"),
    ("({x} < {n}).all()", "away({x}, {n})"),
    ("torch.signbit({x})", "away({x}, 0)"),
    ("({x} * 2).to(torch.int64)", "unrounded({x})"),
    ("{x}.abs().to(torch.uint8)", "unrounded({x})", "below({x}, 20)"),
    ("{x}.to(torch.int32)", "unrounded({x})"),
    ("{x}.bool()", "away({x}, 0)"),
    ("torch.bucketize({x}.detach(), torch.tensor([-1.0, 0.0, 0.5], dtype={x}.dtype))", "away({x}, -1, 0, 0.5)"),
    ("torch.histc({x}.detach(), 3, -2, 2)", "away({x}, -2, -2 / 3, 2 / 3, 2)"),
    ("torch.isclose({x}, {x} + 1)",),
    ("torch.tensor({x}.shape[0]) * {x}",),
    ("{x}.numel() * {x}",),
]

# Two float variables that broadcast, and sometimes a boolean {m} or an integer {i} one.
_BINARY: list[tuple[str, ...]] = [
    ("{x} + {y}",),
    ("{x} - {y}",),
    ("{x} * {y}",),
    ("{x} / {y}", "above({y}.abs(), 0.2)"),
    ("torch.add({x}, {y}, alpha={n})",),
    ("torch.rsub({x}, {y}, alpha=2)",),
    ("torch.sub({x}, {y}, alpha={n})",),
    ("torch.maximum({x}, {y})", "apart({x}, {y})"),
    ("torch.fmin({x}, {y})", "apart({x}, {y})"),
    ("torch.atan2({x}, {y})", "away({x}, 0)"),
    ("torch.hypot({x}, {y})", "away({x}, 0)"),
    ("torch.logaddexp({x}, {y})",),
    ("torch.logaddexp2({x}, {y})",),
    ("torch.lerp({x}, {y}, {n})",),
    ("torch.addcmul({x}, {y}, {y}, value={n})",),
    ("torch.addcdiv({x}, {y}, {y}.exp(), value={n})", "below({y}, 2)"),
    ("torch.copysign({x}, {y})", "away({x}, 0)", "away({y}, 0)"),
    ("torch.xlogy({x}, {y})", "above({y}, 0.1)"),
    ("{x} ** {y}", "above({x}, 0.1)", "below({y}, 3)"),
    ("torch.fmod({x}, {y})", "unrounded({x} / {y})"),
    ("torch.remainder({x}, {y})", "unrounded({x} / {y})"),
    ("torch.ldexp({x}, torch.tensor(2))",),
    ("torch.where({x} > {y}, {x}, {y})", "apart({x}, {y})"),
    ("torch.where({x} < {n}, {x}, {y}.detach())", "away({x}, {n})"),
    ("torch.clamp({x}, min={y})", "apart({x}, {y})"),
    ("torch.heaviside({x}, {y}.detach())", "away({x}, 0)"),
    ("torch.prelu({x}, {y})", "away({x}, 0)"),
    ("{x} > {y}", "apart({x}, {y})"),
    ("torch.eq({x}, {y})", "apart({x}, {y})"),
    ("torch.cat([{x}, {y}], {d})",),
    ("torch.stack([{x}, {y}])",),
    ("torch.stack((*torch.broadcast_tensors({x}, {y}),), -1)",),
    ("torch.hstack([{x}, {y}])",),
    ("torch.vstack([{x}, {y}])",),
    ("torch.dstack([{x}, {y}])",),
    ("torch.column_stack([{x}, {y}])",),
    ("{x} @ {y}",),
    ("{x} @ {y}.mT",),
    ("torch.matmul({x}, {y})",),
    ("torch.mm({x}, {y})",),
    ("torch.bmm({x}, {y})",),
    ("torch.mv({x}, {y})",),
    ("torch.outer({x}, {y})",),
    ("torch.inner({x}, {y})",),
    ("F.linear({x}, {y})",),
    ("F.bilinear({x}, {y}, torch.ones(2, {x}.shape[-1], {y}.shape[-1], dtype={x}.dtype))",),
    ("torch.einsum('ij,jk->ik', {x}, {y})",),
    ("torch.einsum('ij,j->i', {x}, {y})",),
    ("torch.einsum('i,j->ij', {x}, {y})",),
    ("torch.einsum('ij,ij->', {x}, {y})",),
    ("torch.einsum('bij,bjk->bik', {x}, {y})",),
    ("torch.tensordot({x}, {y}, ([0], [0]))",),
    ("torch.addmm({x}, {y}, {y}.mT, beta={n})",),
    ("torch.cdist({x}, {y} + 4.5)", "below({x}, 2)", "below({y}, 2)"),
    ("torch.dist({x}, {y})", "apart({x}, {y})"),
    ("F.cosine_similarity({x}, {y}, {d})", "away({x}, 0)", "away({y}, 0)"),
    ("F.pairwise_distance({x}, {y})", "apart({x}, {y})"),
    ("F.mse_loss({x}, {y})",),
    ("F.l1_loss({x}, {y}, reduction='sum')", "apart({x}, {y})"),
    ("F.smooth_l1_loss({x}, {y})", "apart(({x} - {y}).abs(), 1.0)"),
    ("F.huber_loss({x}, {y}, reduction='none', delta=0.5)", "apart(({x} - {y}).abs(), 0.5)"),
    ("F.kl_div({x}, {y}.sigmoid(), reduction='batchmean')",),
    ("F.binary_cross_entropy_with_logits({x}, {y}.sigmoid())",),
    ("F.binary_cross_entropy({x}.sigmoid(), {y}.sigmoid())", "below({x}, 4)"),
    ("F.gaussian_nll_loss({x}, {y}, {y}.exp())", "below({y}, 2)"),
    ("F.poisson_nll_loss({x}, {y})", "below({x}, 3)"),
    ("F.soft_margin_loss({x}, {y}.sign())", "away({y}, 0)"),
    ("F.cross_entropy({x}, {y}.softmax(1))",),
    ("F.conv1d({x}, {y})",),
    ("F.conv1d({x}, {y}, stride=2, padding=1)",),
    ("F.conv1d({x}, {y}, dilation=2, padding='same')",),
    ("F.conv_transpose1d({x}, {y})",),
    ("F.conv_transpose1d({x}, {y}, stride=2, padding=1)",),
    ("F.conv2d({x}, {y})",),
    ("F.conv2d({x}, {y}, padding=1)",),
    ("F.conv2d({x}, {y}[:, :1], groups={x}.shape[1])",),
    ("F.conv1d({x}, {y}[:, :1].repeat({x}.shape[1], 1, 1)[:{x}.shape[1]], groups={x}.shape[1], padding=2)",),
    ("F.scaled_dot_product_attention({x}, {y}, {y})",),
    ("F.scaled_dot_product_attention({x}, {y}, {y}, attn_mask={y} @ {x}.mT)",),
    ("torch.linalg.cross({x}, {y})",),
    ("torch.kron({x}, {y})",),
    ("torch.broadcast_to({x}, {y}.shape)",),
    ("{x}.expand_as({y})",),
    ("{x}.reshape({y}.shape)",),
    ("torch.sigmoid({x}) * {y}",),
    ("{x} + {y}.detach()",),
    (
        "torch.searchsorted({x}.detach().sort().values, {y}.detach())",
        "distinct(torch.cat([{x}.flatten(), {y}.flatten()]))",
    ),
    ("torch.masked_fill({x}, {y} > 0, {n})", "away({y}, 0)"),
    ("torch.complex({x}, {y})",),
    ("torch.cross({x}, {y}, -1)",),
    ("torch.func.jvp(lambda u, v: u * v.sin(), ({x}, {y}), ({y}, {x}))[1]",),
    ("torch.func.vmap(lambda u, v: u @ v)({x}, {y})",),
    ("torch.func.vmap(lambda u, v: u + v, (None, 0))({x}, {y})",),
    ("torch.func.grad(lambda u: (u * {y}).sin().sum())({x})",),
    ("torch.func.vmap(torch.func.grad(lambda u, v: (u * v).sum().sin()))({x}, {y})",),
    ("torch.cumsum({x} * {y}, -1)",),
    ("torch.vecdot({x}, {y})",),
    ("torch.linalg.vecdot({x}, {y})",),
    ("torch.nextafter({x}.detach(), {y}.detach())", "apart({x}, {y})"),
]

# A boolean {m}, an integer {i}, a float {x} that broadcasts with them.
_MIXED: list[tuple[str, ...]] = [
    ("torch.where({m}, {x}, {n})",),
    ("{x}.masked_fill({m}, {n})",),
    ("{x} * {m}",),
    ("torch.where({m}, {x}, {i})",),
    ("{x} + {i}",),
    ("{x} * {i}",),
    ("{x} / ({i} * {i} + 1)",),
    ("{i} / ({x} ** 2 + 1)",),
    ("{m}.to({x}.dtype)",),
    ("{i}.to({x}.dtype) * 0.1",),
    ("{m}.sum()",),
    ("{m}.any()",),
    ("{m}.all({e})",),
    ("~{m}",),
    ("{m} & {m}",),
    ("{m} | ({i} > 1)",),
    ("{m} ^ ({i} > 0)",),
    ("torch.logical_not({i})",),
    ("torch.logical_and({m}, {i})",),
    ("{i} + 1",),
    ("{i} * 3",),
    ("{i} // 2",),
    ("{i} % 3",),
    ("-{i}",),
    ("{i} ** 2",),
    ("{i} & 3",),
    ("{i} | 1",),
    ("{i} ^ 5",),
    ("~{i}",),
    ("{i} << 1",),
    ("{i} >> 1",),
    ("{i}.abs()",),
    ("{i}.sum()",),
    ("{i}.sum({f})",),
    ("{i}.prod({f})",),
    ("{i}.cumsum({f})",),
    ("{i}.amax({f})",),
    ("{i}.max()",),
    ("{i}.clamp(0, 3)",),
    ("{i}.float().double().mean()",),
    ("torch.div({i}, 2, rounding_mode='trunc')",),
    ("torch.div({i}, -3, rounding_mode='floor')",),
    ("{i} + {m}",),
    ("{i} * {m}",),
    ("{i} == 2",),
    ("{i} > {m}",),
    ("{i}.sort(stable=True).values",),
    ("{i}.sign()",),
    ("{i}.flip(0)",),
    ("{i}.bitwise_not()",),
    ("torch.gcd({i}, torch.tensor(6))",),
    ("torch.fmod({i}, 3)",),
    ("{i}.remainder(-3)",),
    ("torch.maximum({i}, {i}.flip(0))",),
    ("{i}.unique(return_inverse=True)[1]",),
    ("torch.isin({i}, torch.tensor([0, 2, 5]))",),
    ("{i}.to(torch.int8)",),
    ("{i}.to(torch.uint8)",),
    ("F.one_hot({i} % 4, 4)",),
    ("torch.eye(4, dtype={x}.dtype)[{i} % 4]",),
    ("F.embedding({i} % 3, torch.arange(6.0, dtype={x}.dtype).reshape(3, 2) * {x}.mean())",),
    ("{x}[{i} % {x}.shape[0]]",),
    ("{x}.index_select(0, {i}.flatten() % {x}.shape[0])",),
    ("torch.take({x}, {i} % {x}.numel())",),
    ("{x}[..., {i} % {x}.shape[-1]]",),
    ("{x}.take_along_dim({i} % {x}.shape[0], 0)",),
    ("{x}.gather(0, {i} % {x}.shape[0])",),
    ("{x}.gather(-1, ({i} % {x}.shape[-1]).long())",),
    ("{x}.scatter_add(0, {i} % {x}.shape[0], {x} * 2)",),
    ("torch.zeros(3, dtype={x}.dtype).index_add(0, {i}.flatten() % 3, {x}.flatten()[:{i}.numel()])",),
    ("F.cross_entropy({x}, {i} % {x}.shape[1])",),
    ("F.nll_loss({x}.log_softmax(1), {i} % {x}.shape[1], reduction='none')",),
    ("torch.zeros(3, dtype={x}.dtype).scatter_reduce(0, {i}.flatten() % 3, {x}.flatten()[:{i}.numel()], 'sum')",),
    ("torch.zeros(4, dtype={x}.dtype).index_put(({i}.flatten() % 4,), {x}.sum(), accumulate=True)",),
    ("{x}[{i}.sum() % {x}.shape[0]]",),
    ("{i}.argsort(stable=True)",),
    ("torch.repeat_interleave({i}, 2)",),
    ("{m}.cumsum({e})",),
    ("{m}.float().argmax({e})",),
    ("{m}.int() - 1",),
    ("torch.where({m}, 1, 2)",),
    ("torch.where({m}, {i}, {i} * 2)",),
    ("{m} * 2.5 + {x}",),
    ("torch.masked.sum({x}, mask={m})",),
    ("{m}.nonzero().shape[1] * {x}",),
    ("{x}.masked_scatter({m}.expand_as({x}), {x} * 2 + 1)",),
    ("torch.cat([{i}, {m}])",),
    ("torch.einsum('ij,j->i', {i}, {i}[0])",),
    ("{i} @ {i}.mT",),
    ("{x} * 2 if torch.result_type({i}, {x}) == {x}.dtype else {x}",),
    ("{i}.to(torch.int16) * {i}.to(torch.int8)",),
    ("{i}.bool()",),
    ("{m}.long().cumprod({e})",),
    ("torch.stack([{i}, {i}.roll(1)])",),
    ("{m}.T",),
    ("{m}.flatten()",),
    ("{i}.flatten()[1:]",),
    ("{i}.unsqueeze(-1)",),
]

# A complex variable {z}, and a float one that broadcasts with it.
_COMPLEX: list[tuple[str, ...]] = [
    ("{z}.real",),
    ("{z}.imag",),
    ("{z}.conj()",),
    ("{z}.abs()", "above({z}.abs(), 0.1)"),
    ("{z}.angle()", "away({z}.imag, 0)"),
    ("torch.view_as_real({z})",),
    ("{z} * {x}",),
    ("{z} + {x}",),
    ("{z} - 1j * {x}",),
    ("{z} * {z}.conj()",),
    ("({z} * {z}.conj()).real",),
    ("{z} / ({x} ** 2 + 1)",),
    ("torch.exp({z})", "below({z}, 2)"),
    ("torch.sin({z})", "below({z}, 2)"),
    ("torch.tanh({z})", "below({z}, 0.9)"),
    ("torch.log({z})", "above({z}.abs(), 0.2)", "away({z}.imag, 0)"),
    ("torch.sqrt({z})", "above({z}.abs(), 0.2)", "away({z}.imag, 0)"),
    ("{z} ** 2",),
    ("{z}.sum()",),
    ("{z}.mean(0)",),
    ("{z}.prod()",),
    ("{z}.cumsum(-1)",),
    ("{z}.sgn()", "above({z}.abs(), 0.2)"),
    ("{z}.mH",),
    ("{z} @ {z}.mH",),
    ("torch.fft.fft({z})",),
    ("torch.fft.ifft({z}, norm='ortho')",),
    ("torch.fft.ifft2({z})",),
    ("torch.view_as_real({z})[..., 0]",),
    ("{z}.reciprocal()", "above({z}.abs(), 0.3)"),
    ("torch.vdot({z}, {z})",),
    ("torch.einsum('ij,kj->ik', {z}, {z}.conj())",),
    ("{z}.flip(0)",),
    ("{z}[0]",),
    ("{z}.reshape(-1)",),
    ("{z}.T.conj()",),
    ("torch.stack([{z}, {z}.conj()])",),
    ("{z}.norm()", "above({z}.norm(), 0.2)"),
    ("{z}.abs().square()", "above({z}.abs(), 0.1)"),
    ("-{z}",),
    ("{z} == 0",),
    ("{z}.cosh()", "below({z}, 1)"),
    ("torch.where({z}.real > 0, {z}, {z}.conj())", "away({z}.real, 0)"),
    ("{z}.conj().imag",),
    ("torch.linalg.det({z} @ {z}.mH + torch.eye({z}.shape[-1]))",),
    ("torch.linalg.solve({z} @ {z}.mH + 2 * torch.eye({z}.shape[-2]), {z})",),
    ("{z}.neg().conj().real",),
]

# A square well-conditioned matrix {w}, made of a float variable.
_LINALG: list[tuple[str, ...]] = [
    ("torch.linalg.inv({w})",),
    ("torch.linalg.det({w})",),
    ("torch.linalg.slogdet({w})[1]",),
    ("torch.logdet({w} @ {w}.mT)",),
    ("torch.linalg.solve({w}, {x})",),
    ("torch.linalg.solve({w}, {x}, left=False)",),
    ("torch.linalg.cholesky({w} @ {w}.mT)",),
    ("torch.linalg.eigvalsh({w} + {w}.mT)", "distinct(torch.linalg.eigvalsh({w} + {w}.mT), -1)"),
    ("torch.linalg.svdvals({w})", "distinct(torch.linalg.svdvals({w}), -1)"),
    ("torch.linalg.qr({w})[1]",),
    ("torch.linalg.qr({w}).Q",),
    ("torch.matrix_exp({w} * 0.2)",),
    ("torch.linalg.pinv({w})",),
    ("torch.linalg.matrix_norm({w})",),
    ("torch.linalg.matrix_norm({w}, 'nuc')", "distinct(torch.linalg.svdvals({w}), -1)"),
    ("torch.linalg.solve_triangular({w}, {x}, upper=True)",),
    ("torch.linalg.solve_triangular({w}, {x}, upper=False, unitriangular=False)",),
    ("torch.cholesky_solve({x}, torch.linalg.cholesky({w} @ {w}.mT))",),
    ("torch.linalg.lu_factor({w})[0]",),
    ("torch.linalg.lu({w})[2]",),
    ("torch.linalg.matrix_power({w} * 0.2, -2) * 0.01",),
    ("torch.cholesky_inverse(torch.linalg.cholesky({w} @ {w}.mT))",),
    ("torch.linalg.eigh({w} + {w}.mT)[0]", "distinct(torch.linalg.eigvalsh({w} + {w}.mT), -1)"),
    (
        "torch.linalg.eigh({w} + {w}.mT)[1].abs()",
        "distinct(torch.linalg.eigvalsh({w} + {w}.mT), -1)",
        "away(torch.linalg.eigh({w} + {w}.mT)[1], 0)",
    ),
    ("torch.linalg.inv_ex({w})[0]",),
    ("torch.linalg.cond({w}, 'fro')",),
    ("torch.linalg.tensorinv({w}.unsqueeze(0), 2)",),
    ("torch.linalg.lstsq({w}, {x})[0]",),
    ("torch.linalg.householder_product({w} * 0.1, {w}.diagonal() * 0.1)",),
    ("torch.triu({w}) @ {x}",),
    ("torch.linalg.vander({w}.diagonal() * 0.3)",),
]


def _fill(w: Writer, row: tuple[str, ...], fields: dict[str, Any]) -> str:
    text = " ".join(row)
    if "{d}" in text:
        fields["d"] = w.dim(fields["x"])
    if "{e}" in text:
        fields["e"] = w.dim(fields["m"])
    if "{f}" in text:
        fields["f"] = w.dim(fields["i"])
    fields["n"] = w.number() or 0.5
    fields["p"] = abs(w.number()) + 0.25
    expression, *guards = (part.format(**fields) for part in row)
    return w.let(expression, *guards)


@operator(30)
def unary(w: Writer) -> None:
    _fill(w, w.rng.choice(_UNARY), {"x": w.real()})


@operator(18)
def binary(w: Writer) -> None:
    x = w.real()
    _fill(w, w.rng.choice(_BINARY), {"x": x, "y": w.like(x) if w.rng.random() < 0.7 else w.real()})


@operator(12)
def mixed(w: Writer) -> None:
    row = w.rng.choice(_MIXED)
    text, fields = " ".join(row), {"x": w.real()}
    if "{m}" in text:
        fields["m"] = w.boolean()
    if "{i}" in text:
        fields["i"] = w.integer()
    _fill(w, row, fields)


@operator(6)
def of_complex(w: Writer) -> None:
    _fill(w, w.rng.choice(_COMPLEX), {"z": w.complex(), "x": w.real()})


@operator(5)
def linear_algebra(w: Writer) -> None:
    x = w.real(at_least=2)
    size = w.shape(x)[-2]
    source = w.rng.choice([f"{x}.sin()", f"torch.tanh({x})"])
    product = f"{source} @ {source}.mT" if w.shape(x)[-1] != size else source
    matrix = w.let(f"torch.eye({size}, dtype={x}.dtype) * {2 * size + 1.5} + {product}")
    expression, *guards = (part.format(w=matrix, x=x) for part in w.rng.choice(_LINALG))
    if guards:  # they are evaluated before the statement, when there is no matrix yet
        raise NoChoice
    w.let(expression)


@operator(4)
def square_matrix(w: Writer) -> None:
    """A matrix for the next linear algebra, with eigenvalues and singular values that differ."""
    x = w.pick(lambda x: x.is_floating_point() and x.ndim >= 2 and x.shape[-1] == x.shape[-2])
    size = w.shape(x)[-1]
    diagonal = [round(3.0 + 1.7 * i, 2) for i in range(size)]
    w.let(f"torch.diag(torch.tensor({diagonal}, dtype={x}.dtype)) + 0.2 * {x}.tanh()")


@operator(4)
def of_square_matrix(w: Writer) -> None:
    x = w.pick(
        lambda x: (
            x.is_floating_point()
            and x.ndim >= 2
            and x.shape[-1] == x.shape[-2] > 1
            and bool((x.diagonal(dim1=-2, dim2=-1) > 2).all())
        )
    )
    row = w.rng.choice(_LINALG)
    expression, *guards = (part.format(w=x, x=w.real(at_least=1)) for part in row)
    w.let(expression, f"conditioned({x})", *guards)


# In-place writes. {v} is the variable that is written to.
_IN_PLACE = [
    "{v}.add_({y})",
    "{v}.mul_({y})",
    "{v}.sub_({n})",
    "{v} += {y}",
    "{v} *= {n}",
    "{v} -= {y}",
    "{v}.neg_()",
    "{v}.sin_()",
    "{v}.tanh_()",
    "{v}.copy_({y})",
    "{v}.zero_()",
    "{v}.fill_({n})",
    "{v}[0] = {y}",
    "{v}[0] += {n}",
    "{v}[..., -1] = {n}",
    "{v}[1:] = {v}[:-1].clone()",
    "{v}[::2].mul_({n})",
    "{v}[..., 0].add_({n})",
    "{v}.select(0, 0).fill_({n})",
    "{v}.flatten()[0] = {n}",
    "{v}.view(-1)[1:3].mul_(2)",
    "{v}.T.add_({n})",
    "{v}.diagonal().add_({n})",
    "{v}.diagonal().zero_()",
    "{v}.unsqueeze(0).mul_({n})",
    "{v}.narrow(0, 0, 1).copy_({y})",
    "{v}.transpose(0, -1)[0].sin_()",
    "{v}.masked_fill_({v} > 0, {n})",
    "{v}[{v} > 0.0] = {n}",
    "{v}[[0, -1]] = {n}",
    "{v}.index_fill_(0, torch.tensor([0]), {n})",
    "{v}.index_add_(0, torch.tensor([0, 0]), {v}[:2].detach())",
    "{v}.index_copy_(0, torch.tensor([1, 0]), {v}[:2].clone())",
    "{v}.scatter_(0, torch.zeros_like({v}[:1], dtype=torch.long), {n})",
    "{v}.clamp_(max={n})",
    "{v}.addcmul_({y}, {y}, value={n})",
    "{v}.lerp_({y}, 0.5)",
    "{v}.addmm_({v}, {v})",
    "{v}.swapaxes_(0, -1)",
    "{v}.t_()",
    "{v}.unsqueeze_(0)",
    "{v}.squeeze_()",
    "{v}.cumsum_(0)",
    "{v}.tril_()",
    "{v}.split(1)[0].add_({n})",
    "{v}.chunk(2, -1)[1].mul_({y})",
    "{v}.unbind(0)[1].add_({v}[0])",
    "{v}.data.mul_({n})",
    "{v}.detach().add_({n})",
    "{v}.real.mul_({n})",
    "{v}.expand(2, *{v}.shape)[0].add_({n})",
    "torch.add({v}, {n}, out={v})",
    "torch.mul({v}.detach(), {n}, out={v}.data)",
    "{v}.as_strided((2,), (1,)).mul_({n})",
    "{v}.relu_()",
    "{v}.sigmoid_()",
    "{v}.pow_(2)",
    "{v}.masked_scatter_({v} > 0, {v}.detach() * 2)",
    "{v}.index_put_((torch.tensor([0, 1]),), {v}[:2].detach() * {n})",
    "{v}.index_put_((torch.tensor([0, 0]),), torch.ones((), dtype={v}.dtype), accumulate=True)",
    "{v}.resize_as_({v})",
    "{v}.set_({v}.clone())",
    "{v}.fill_diagonal_({n})",
    "{v}.div_({p})",
    "{v}.requires_grad_({v}.requires_grad)",
]


@operator(16)
def in_place(w: Writer) -> None:
    v = w.real()
    if v in w.arguments and w.rng.random() < 0.5:
        raise NoChoice
    template = w.rng.choice(_IN_PLACE)
    near = ["away({v}, 0)"] if "> 0" in template or "relu" in template else []
    if "clamp" in template:
        near = ["away({v}, {n})"]
    fields = {"v": v, "y": w.like(v), "n": w.number() or 0.5, "p": abs(w.number()) + 0.25}
    lines = [template.format(**fields)]
    if w.rng.random() < 0.15:
        lines = ["with torch.no_grad():", "    " + lines[0]]
    w.do(*lines, guards=[g.format(**fields) for g in near])


@operator(3)
def in_place_of_others(w: Writer) -> None:
    """Integer, boolean and complex tensors are written too."""
    kind = w.rng.choice(["i", "m", "z"])
    if kind == "i":
        v = w.integer()
        template = w.rng.choice(
            [
                "{v}.add_(1)",
                "{v}[0] = 2",
                "{v}.mul_(2)",
                "{v} %= 3",
                "{v}.flatten()[0] = 1",
                "{v}[..., -1] += 1",
                "{v}.bitwise_and_(3)",
                "{v}.clamp_(0, 2)",
                "{v}.neg_()",
            ]
        )
    elif kind == "m":
        v = w.boolean()
        template = w.rng.choice(
            ["{v}.logical_not_()", "{v}[0] = True", "{v} &= True", "{v}[..., -1] = False", "{v} ^= True"]
        )
    else:
        v = w.complex()
        template = w.rng.choice(
            [
                "{v}.mul_(1j)",
                "{v}.real.add_(0.5)",
                "{v}.imag.neg_()",
                "{v}[0] = 1j",
                "torch.view_as_real({v})[..., 0].mul_(2)",
                "{v}.add_({v}.conj())",
                "{v}.conj_physical_()",
                "{v}.conj().mul_(1j)",
            ]
        )
    w.do(template.format(v=v))


@operator(4)
def view_then_write(w: Writer) -> None:
    """A copy, a view of it that is kept, a write to one of them."""
    x = w.real(at_least=1)
    base = w.let(f"{x}.clone()" if w.rng.random() < 0.7 else f"{x} * 1")
    view = w.new()
    expression = w.rng.choice(
        [
            "{v}[0]",
            "{v}[1:]",
            "{v}.T",
            "{v}.view(-1)",
            "{v}[..., 0]",
            "{v}.unsqueeze(0)",
            "{v}.diagonal()",
            "{v}.flatten()[::2]",
            "{v}.reshape(-1)",
            "{v}.transpose(0, -1)",
            "{v}.detach()",
            "{v}.expand(2, *{v}.shape)",
            "{v}.squeeze()",
            "{v}.chunk(2)[1]",
            "{v}.contiguous()",
            "{v}.mT",
            "{v}[...]",
            "{v}.narrow(0, 1, 1)",
            "{v}.unfold(0, 2, 1)[0]",
            "{v}.view({v}.shape)",
        ]
    )
    w.do(f"{view} = {expression.format(v=base)}")
    written = w.rng.choice([base, view])
    w.do(
        w.rng.choice(
            [
                "{v}.mul_({n})",
                "{v}.add_({n})",
                "{v}[0] = {n}",
                "{v}.zero_()",
                "{v}[..., -1].mul_({n})",
                "{v} -= {n}",
                "{v}.sin_()",
                "{v}.copy_({v} * 2)",
            ]
        ).format(v=written, n=w.number() or 0.5)
    )


@operator(4)
def gradient_inside(w: Writer) -> None:
    """A part of the program is differentiated by torch."""
    x = w.real()
    u = w.new()
    function = w.rng.choice(
        [
            "({u}.sin() * {u}).sum()",
            "({u} ** 3).mean()",
            "{u}.tanh().square().sum()",
            "torch.logsumexp({u}.flatten(), 0)",
            "({u} * {u}.detach()).sum()",
            "F.softplus({u}).prod() * 0.1",
            "({u}.cumsum(-1) ** 2).sum()",
            "F.softmax({u}, -1).square().sum()",
            "({u} @ {u}.mT).sin().sum()",
        ]
    )
    start = w.rng.choice(
        ["{x}.detach().requires_grad_()", "{x} if {x}.requires_grad else {x}.detach().requires_grad_()"]
    )
    result = w.new()
    # Without `create_graph=True` jtbridge asks for `stop_gradient`, where torch takes the result for a constant.
    again = ", create_graph=True"
    w.do(
        "with torch.enable_grad():",
        f"    {u} = {start.format(x=x)}",
        f"    ({result},) = torch.autograd.grad({function.format(u=u)}, {u}{again})",
    )


@operator(2)
def without_recording(w: Writer) -> None:
    x = w.real()
    name = w.new()
    body = w.rng.choice(["{x}.sin() * {n}", "{x} * {x}", "{x}.cumsum(-1)", "{x}.clone().mul_({n})", "{x}.softmax(-1)"])
    mode = w.rng.choice(["torch.no_grad()", "torch.set_grad_enabled(False)", "torch.enable_grad()"])
    w.do(f"with {mode}:", f"    {name} = " + body.format(x=x, n=w.number() or 0.5))


@operator(4)
def python(w: Writer) -> None:
    """Python's control flow, on shapes."""
    x = w.real(at_least=1)
    name, n = w.new(), w.number() or 0.5
    w.do(
        *w.rng.choice(
            [
                [f"{name} = {x}.sum(0) if {x}.shape[0] > 2 else {x} * {n}"],
                [f"{name} = sum({x}[i] * (i + 1) for i in range({x}.shape[0]))"],
                [f"{name} = torch.stack([row * i for i, row in enumerate({x})])"],
                [
                    f"{name} = {x}.clone()",
                    f"for i in range(1, {x}.shape[0]):",
                    f"    {name}[i] = {name}[i] + {n} * {name}[i - 1]",
                ],
                [f"{name} = {x} * 1", f"for row in {name}:", f"    row.mul_({n})"],
                [
                    f"{name} = {x}.new_zeros({x}.shape[0])",
                    f"for i in range({x}.shape[0]):",
                    f"    {name}[i] = {x}[i].sum()",
                ],
                [f"{name} = {x}", "for _ in range(3):", f"    {name} = {name}.tanh() + {x}"],
                [f"{name} = {x}", f"while {name}.ndim > 1:", f"    {name} = {name}.mean(-1)"],
                [f"{name} = torch.cat([{x}[i:i + 1] * {n} ** i for i in range(len({x}))])"],
                [f"first, *_ = {x}.unbind(0)", f"{name} = first + {x}"],
                [f"{name} = {x}.reshape({x}.numel() // 2, 2) if {x}.numel() % 2 == 0 else {x}.flatten()"],
                [f"{name} = torch.zeros_like({x})", f"{name}[...] = {x}", f"{name}[0] *= {n}"],
                [f"{name} = {x}.sin()", f"{name}.detach_()"],
                [f"{name} = [{x}]", f"{name}.append({x} * {n})", f"{name} = {name}[0] + {name}.pop()"],
            ]
        )
    )


@operator(4)
def indexed(w: Writer) -> None:
    """Gather, scatter and their relatives, with literal indices."""
    x = w.real(at_least=1)
    shape = w.shape(x)
    dim = w.rng.randrange(len(shape))
    size = shape[dim]
    some = w.integers(3, size)
    unique = w.integers(min(2, size), size, unique=True)
    signed = [i - size if w.rng.random() < 0.4 else i for i in some]
    inside = [slice(None)] * dim
    colons = ":, " * len(inside)
    count = math.prod(shape)
    column = ", ".join("-1" if i == dim else "1" for i in range(len(shape)))
    wanted = ", ".join("3" if i == dim else str(n) for i, n in enumerate(shape))
    index = f"torch.tensor({some}).reshape({column}).expand({wanted})"
    copies = f"torch.cat([{x}] * 3, {dim})"
    first = f"{copies}.narrow({dim}, 0, 3)"
    one = f"torch.tensor({unique[:1]}).expand({', '.join('1' for _ in shape)})"
    w.let(
        w.rng.choice(
            [
                f"{x}[{colons}{signed}]",
                f"{x}[{colons}torch.tensor({signed})]",
                f"{x}.index_select({dim}, torch.tensor({some}))",
                f"{x}.gather({dim}, {index})",
                f"torch.take_along_dim({x}, {index}, {dim})",
                f"{x}.take(torch.tensor({w.integers(4, count)}))",
                f"{x}.scatter({dim}, {one}, {w.number()})",
                f"{x}.scatter_add({dim}, {index}, {copies})",
                f"{x}.scatter_reduce({dim}, {index}, {copies}.sin(), 'mean')",
                f"{x}.scatter_reduce({dim}, {index}, {copies} + 0.3, 'prod', include_self=False)",
                f"{x}.index_add({dim}, torch.tensor({some}), {first}, alpha=0.5)",
                f"{x}.index_copy({dim}, torch.tensor({unique}), {x}.narrow({dim}, 0, {len(unique)}) * 2)",
                f"{x}.index_fill({dim}, torch.tensor({unique}), 0.7)",
                f"{x}.select_scatter({x}.select({dim}, 0) * 2, {dim}, -1)",
                f"{x}.slice_scatter({x}.narrow({dim}, 0, 1) + 1, {dim}, 0, 1)",
                f"{x}.diagonal_scatter({x}.diagonal() * 3)",
                f"{x}.index_put((torch.tensor({w.integers(3, shape[0])}),), {x}[:1] * 2, accumulate=True)",
                f"{x}.masked_fill(torch.arange({shape[-1]}) % 2 == 0, 0.25)",
                f"{x}[torch.arange({shape[0]}) % 2 == 0]",
                f"{x}[{colons}[True] + [False] * {size - 1}]",
                f"{x}[torch.arange({shape[0]}), 0]",
                f"{x}[[0, -1]][:, [0]]",
                f"{x}[{colons}None, {signed[0]}]",
                f"{x}[[[0, -1], [0, 0]]]",
                f"{x}[[0, -1], ..., [0, -1]]",
                f"{x}[0:1, ..., [0, -1, 0]]",
                f"torch.index_reduce({x}, {dim}, torch.tensor({some}), {first}.cos(), 'mean')",
            ]
        )
    )


@operator(3)
def several(w: Writer) -> None:
    """Operators with more than one result, all of which are variables afterwards."""
    x = w.real(at_least=1)
    d = w.dim(x)
    first, second = w.new(), w.new()
    text, *guards = w.rng.choice(
        [
            ("{x}.sort({d})", "distinct({x}, {d})"),
            ("{x}.topk(2, {d})", "distinct({x}, {d})"),
            ("{x}.max({d})", "distinct({x}, {d})"),
            ("torch.var_mean({x}, {d})", "spread({x}, {d})"),
            ("torch.std_mean({x}, {d})", "spread({x}, {d})"),
            ("{x}.chunk(2, {d})",),
            ("{x}.tensor_split(2, {d})",),
            ("torch.aminmax({x}, dim={d})", "distinct({x}, {d})"),
            ("torch.broadcast_tensors({x}, {x}[:1])",),
            ("torch.cummax({x}, {d})", "distinct({x}, {d})"),
            ("torch.frexp({x}.detach())", "away({x}, 0, 0.5, 1, 2, 4, -0.5, -1, -2, -4)"),
            ("torch.linalg.slogdet(torch.eye({x}.shape[-1], dtype={x}.dtype) * 9 + {x})", "below({x}, 1.5)"),
            ("F.max_pool1d({x}, 2, return_indices=True)", "distinct({x}, -1)"),
            ("{x}.median({d})", "distinct({x}, {d})"),
            ("torch.gradient({x}, dim={d})[0], {x}.mean()",),
        ]
    )
    w.do(f"{first}, {second} = {text.format(x=x, d=d)}", guards=[g.format(x=x, d=d) for g in guards])
