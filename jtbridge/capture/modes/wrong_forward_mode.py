"""Operators for which torch's forward mode is wrong, without an error (torch 2.13)."""

from __future__ import annotations

from typing import Any

import torch

from jtbridge._compat import OpOverload

# triangular_solve takes the tangent of the half of a matrix that it does not read for one that it reads. The formula of
# cholesky_inverse is wrong for every tangent. A view that is transposed in place transposes the tangent of the tensor
# that it is a view of. The results of frac, of remainders by a number and of copied views have their tangents in the
# memory of the argument's, and a later write in place writes to it. The derivative of atan2 at the origin is NaN, where
# the gradient is 0. That of logcumsumexp loses all digits for elements far below the largest.
_ALWAYS = frozenset(
    {
        torch.ops.aten.atan2.default,
        torch.ops.aten.atan2_.default,
        torch.ops.aten.cholesky_inverse.default,
        torch.ops.aten.fmod.Scalar,
        torch.ops.aten.frac.default,
        torch.ops.aten.logcumsumexp.default,
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
# It loses the imaginary part of a power of a real tensor, or to the power of one, that is complex.
_POWERS = frozenset(
    {
        *(torch.ops.aten.pow.Tensor_Tensor, torch.ops.aten.pow.Tensor_Scalar, torch.ops.aten.pow.Scalar),
        *(torch.ops.aten.pow_.Tensor, torch.ops.aten.pow_.Scalar),
    }
)
# It is 0 for the reduction "prod".
_SCATTER_REDUCE = frozenset({torch.ops.aten.scatter_reduce.two, torch.ops.aten.scatter_reduce_.two})


def has_wrong_forward_mode(fn: OpOverload, args: tuple) -> bool:
    """Return whether torch's forward mode of a call is not the transpose of its gradient."""
    return (
        fn in _ALWAYS
        or torch.Tag.view_copy in fn.tags
        or (fn in _SCATTER_REDUCE and args[4] == "prod")
        or (fn in _POWERS and _is_complex(args[0]) != _is_complex(args[1]))
        or (fn is torch.ops.aten.native_dropout.default and args[2] is False)  # it copies, as `frac` does
    )


def _is_complex(operand: Any) -> bool:
    """Return whether a tensor or a number is complex."""
    return operand.is_complex() if isinstance(operand, torch.Tensor) else isinstance(operand, complex)
