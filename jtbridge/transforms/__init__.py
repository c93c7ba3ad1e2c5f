"""Derived functions: derivatives and batches of torch functions, computed by torch, and closed under composition.

Each derived function is a :class:`TorchFunction` made from another one, so ``Vmap(Vjp(f))`` or ``Vjp(Vjp(f))`` need no
extra rule. Derived functions follow JAX's conventions: a cotangent of a complex array is the conjugate of
torch's, since JAX transposes without conjugating (https://docs.jax.dev/en/latest/notebooks/autodiff_cookbook.html).
"""

from ._batch_statistics import with_differentiable_statistics
from ._composite import FUSED, WITHOUT_DOUBLE_BACKWARD
from ._derived import (
    DetachedBackwardError,
    conjugate,
    once_differentiable_error,
    refuse_lost_gradients,
    refuse_once_differentiable,
    refuse_wrong_batches,
    refused_detached_backwards,
)
from ._jvp import MAX_JACOBIAN, Jvp, have_nan, without_nan
from ._linearity import SMALL, may_be_nonlinear, refuse_nonlinear
from ._padded_embedding import PADDED
from ._rows import RowAxes, row_axes, with_rows
from ._vjp import Vjp, dense_gradient
from ._vmap import Vmap, of_results, unbatched
from ._vmap_guard import SetGuard, StoredTensorError
