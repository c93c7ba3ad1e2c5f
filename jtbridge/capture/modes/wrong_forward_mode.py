"""Operators for which torch's forward mode is wrong, without an error (torch 2.13)."""

from __future__ import annotations

from typing import Any

import torch

from jtbridge._compat import OpOverload

# triangular_solve also uses the tangent of the half of the matrix that it does not read. The formula of
# cholesky_inverse is wrong for every tangent. If a view is transposed in place, the tangent of its base is transposed.
# For frac, remainders by a number and copied views, the tangent of the result shares memory with the tangent of the
# argument, so a later in-place write changes both. The derivative of atan2 at the origin is NaN, where the gradient is
# 0. The derivative of logcumsumexp loses all digits for elements far below the largest. That of prelu at 0 is 1,
# where the gradient is the weight.
_ALWAYS = frozenset(
    {
        torch.ops.aten.atan2.default,
        torch.ops.aten.atan2_.default,
        torch.ops.aten.cholesky_inverse.default,
        torch.ops.aten.fmod.Scalar,
        torch.ops.aten.frac.default,
        torch.ops.aten.logcumsumexp.default,
        torch.ops.aten._prelu_kernel.default,
        torch.ops.aten.remainder.Scalar,
        torch.ops.aten.triangular_solve.default,
        *(
            getattr(torch.ops.aten, name).default
            for name in ("transpose_", "t_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_")
        ),
        torch.ops.aten.squeeze_.dim,
        torch.ops.aten.squeeze_.dims,
    }
)
# Forward mode loses the imaginary part of a power if either the base or the exponent is complex, and the other real.
_POWERS = frozenset(
    {
        *(torch.ops.aten.pow.Tensor_Tensor, torch.ops.aten.pow.Tensor_Scalar, torch.ops.aten.pow.Scalar),
        *(torch.ops.aten.pow_.Tensor, torch.ops.aten.pow_.Scalar),
    }
)
# The forward derivative is 0 for the reduction "prod".
_SCATTER_REDUCE = frozenset({torch.ops.aten.scatter_reduce.two, torch.ops.aten.scatter_reduce_.two})


def has_wrong_forward_mode(fn: OpOverload, args: tuple) -> bool:
    """Return whether torch's forward mode of a call is not the transpose of its gradient."""
    return (
        fn in _ALWAYS
        or torch.Tag.view_copy in fn.tags
        or (fn in _SCATTER_REDUCE and args[4] == "prod")
        or (fn in _POWERS and _is_complex(args[0]) != _is_complex(args[1]))
        or (fn is torch.ops.aten.native_dropout.default and args[2] is False)  # tangents share memory, as for frac
    )


def _is_complex(operand: Any) -> bool:
    """Return whether a tensor or a number is complex."""
    return operand.is_complex() if isinstance(operand, torch.Tensor) else isinstance(operand, complex)
