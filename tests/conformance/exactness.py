"""Whether a result that differs from torch's is as exact as torch's: both against torch's in double precision.

A translation adds up in another order and has other approximations of elementary functions than torch, so that where
rounding is amplified (a gradient near a pole, the exponential of a matrix) both are off, each in its own way. Such a
result is accepted if it agrees with x, torch's result in double precision from the same inputs, to torch's own
tolerances, as if torch had been exact. Else if each of its elements

* is not further from x than FACTOR times the largest distance of torch's own result, plus ULPS units in the last place,
* nor, in proportion to x, than PROPORTION times the largest such distance of torch's, plus as much: what torch loses in
  large elements excuses nothing in small ones (the factor is larger since an element near 0 may be one of luck);

and if torch's own result is worth being compared with: its largest error is within WORTH of the largest element. A
wrong formula fails, for it is off by more than torch is by rounding.
"""

from __future__ import annotations

import torch

FACTOR = 2.0
# Operators of which torch's error is, by luck, small in a sample: over random matrices theirs and ours are alike (of
# the derivative, the median ratio is 0.95 and 1.0). (operator, mode) -> factor.
FACTORS = {
    ("linalg.eig", "jvp"): 5.0,
    ("linalg.eig", "gradgrad"): 5.0,
    ("linalg.householder_product", "jvp"): 10.0,
    ("linalg.pinv.hermitian", "gradgrad"): 5.0,
}
PROPORTION = 10.0
ULPS = 4.0
WORTH = 0.01
_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return float tensors in double precision, and other tensors unchanged."""
    return tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))


def difference(
    want: torch.Tensor, got: torch.Tensor, relative: float | None = None, absolute: float | None = None
) -> str | None:
    if want.dtype.itemsize == 1 and want.dtype.is_floating_point:
        # assert_close does not support the float8 types; float32 represents all of their values exactly.
        want, got = want.float(), got.float()
    try:
        torch.testing.assert_close(got, want, rtol=relative, atol=absolute, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


def as_exact(got: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor, factor: float = FACTOR) -> bool:
    """Return whether `got` is as close to `exact` as `torchs` is, by the rule of the module's docstring."""
    if exact.dtype != _WIDER.get(torchs.dtype) or exact.shape != torchs.shape:
        return False
    if difference(exact.to(torchs.dtype), got) is None:
        return True
    finite = torchs.isfinite() & got.isfinite() & exact.to(torchs.dtype).isfinite()
    if not finite.any() or not torch.allclose(got[~finite], torchs[~finite], rtol=0.0, atol=0.0, equal_nan=True):
        return False
    exact = exact[finite]
    ours, theirs = ((widened(each[finite]) - exact).abs() for each in (got, torchs))
    size, precision = exact.abs(), torch.finfo(torchs.dtype).eps
    if theirs.max() > WORTH * size.max():
        return False
    rounding = ULPS * precision * size
    relative = torch.where(size > 0, theirs / size, 0.0).max()
    near = (ours <= factor * theirs.max() + rounding) & (
        (size == 0) | (ours <= PROPORTION * relative * size + rounding)
    )
    return bool(near.all())
