"""A mode that corrects operators that behave differently on fake tensors than on real ones (torch 2.13)."""

from __future__ import annotations

from typing import Any

import jax
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from jtbridge._compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    outside_modes,
    schema_of,
)
from jtbridge.core.array_types import SYMBOLIC_NUMBERS

from .effects import draws
from .refused_draws import check_draw
from .refused_dtypes import DtypeChecks, is_small
from .refused_shapes import check_shapes

# These operators are wrong for a sparse fake tensor, which has no entries, or the entries of its source.
_FACTS_OF_ENTRIES = frozenset({torch.ops.aten._nnz.default, torch.ops.aten.is_coalesced.default})
_PARTS_BY_ENTRIES = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("values", "_values", "indices", "_indices", "row_indices", "col_indices")
)

# Operators whose fake results have other strides than their real results.
_OTHER_STRIDES = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "_batch_norm_with_update",
        "_log_softmax_backward_data",
        "_native_batch_norm_legit",
        "channel_shuffle",
        "floor_divide",
        "glu_backward",
        "heaviside",
        "huber_loss_backward",
        "log_sigmoid_forward",
        "logaddexp",
        "logical_and",
        "logical_or",
        "logical_xor",
        "max_unpool2d",
        "native_batch_norm",
        "native_batch_norm_backward",
        "native_dropout_backward",
        "native_layer_norm_backward",
        "reflection_pad3d",
        "replication_pad2d_backward",
        "replication_pad3d",
        "roll",
        "rrelu_with_noise",
        "smooth_l1_loss_backward",
    )
) | {
    torch.ops.aten._native_batch_norm_legit.no_stats,
    torch.ops.aten.copysign.Tensor,
    torch.ops.aten.div.Tensor_mode,
    torch.ops.aten.ldexp.Tensor,
    torch.ops.aten.pow.Scalar,
}
# Products, which are lazy zeros if a factor is a lazy zero, whatever the other factor is.
_PRODUCTS = frozenset(
    {
        torch.ops.aten.mul.Tensor,
        torch.ops.aten.dot.default,
        torch.ops.aten.vdot.default,
        torch.ops.aten.linalg_cross.default,
    }
)
# Operators that raise for a fake tensor without elements, such as an empty batch, but not for a real one.
_FAIL_ON_EMPTY = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d",
        "huber_loss_backward",
        "mse_loss_backward",
        "smooth_l1_loss_backward",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
    )
)


# Losses of one sample whose fake results have one axis too many, by the dimensions of their targets.
_MARGINS_OF_ONE = {
    torch.ops.aten.multi_margin_loss.default: 0,
    torch.ops.aten.multilabel_margin_loss_forward.default: 1,
}


class FakeAsReal(TorchDispatchMode):
    """Mode that corrects operators whose behaviour on fake tensors differs from that on real tensors.

    - The lazy zeros of autograd, which the gradient of ``sgn`` returns, are traced as zeros with memory. Torch cannot
      trace operators on lazy zeros. A product with lazy zeros is zero, even if the other factor is infinite or NaN:
      forward mode multiplies the two factors of ``x * 2`` with each other's tangents, and the tangent of a number is a
      lazy zero.
    - ``native_dropout`` without training returns a copy of a real tensor, but returns a fake tensor itself, so that a
      later write to the result would change the argument. It is traced as a copy.
    - A power of Boolean numbers by `True` or `False` is Boolean, but fake results are integers.
    - The margin losses of one sample without a batch axis have no axis, but fake results have one.
    - The fake results of some operators have other strides than results on a CPU, if an argument is not contiguous.
      They get the strides of the CPU, because ``reshape`` returns a view for some strides and a copy for others.
    - Some operators, such as ``max``, raise for a real tensor without elements, but not for a fake one. Others, such as
      ``upsample_nearest2d``, raise for a fake one only. Both are made to do what they do for real tensors.
    - The number of entries of a sparse tensor, the sizes of its indices and values, and whether it is coalesced depend
      on data. An operator that reads one of them raises.

    Args:
        refuses: whether to refuse the dtypes, shapes and draws that torch refuses for real tensors, see `DtypeChecks`,
            `check_shapes` and `check_draw`. It is enough if one trace of a function does so.

    Raises:
        DynamicOutputShapeException, DataDependentOutputException: an operator reads the entries of a sparse tensor.
    """

    def __init__(self, *, refuses: bool = False):
        super().__init__()
        self._dtypes = DtypeChecks() if refuses else None
        self._lazy_zeros = WeakTensorKeyDictionary()  # a set: the values are None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._efficientzerotensor.default:
            return self._lazy(torch.ops.aten.zeros.default(*args, **(kwargs or {})))
        if self._lazy_zeros and self._has_lazy_zeros(func, args):
            out = func(*args, **(kwargs or {}))
            if not func.is_view:
                out = torch.ops.aten.zeros.default(out.shape, dtype=out.dtype, device=out.device)
            return self._lazy(out)
        if func is torch.ops.aten.native_dropout.default and args[2] is False:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if func is torch.ops.aten.pow.Tensor_Scalar and args[0].dtype is torch.bool and isinstance(args[1], bool):
            return args[0].clone() if args[1] else torch.ones_like(args[0])
        if (of_one := _MARGINS_OF_ONE.get(func)) is not None and args[1].dim() == of_one:
            return _margin_of_one(func, *args, **(kwargs or {}))
        if func in _PARTS_BY_ENTRIES and args[0].layout is not torch.strided:
            raise DynamicOutputShapeException(func)
        if func in _FACTS_OF_ENTRIES and args[0].layout is not torch.strided:
            if isinstance(args[0], FakeTensor):
                raise DataDependentOutputException(func)
            with outside_modes():
                return func(*args)
        if func in _FAIL_ON_EMPTY and any(map(_is_empty, args)):
            return _result_without_elements(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        if self._dtypes is not None:
            check_shapes(func, args)
            check_draw(func, args, kwargs or {})
            self._dtypes.check(func, args, kwargs or {}, out)
        if args and _is_empty(args[0]) and is_small(jax.tree.leaves(out)):
            _run_on_empty(func, args, kwargs or {})
        if func in _OTHER_STRIDES:
            return _with_real_strides(func, args, kwargs or {}, out)
        return out

    def _lazy(self, zeros: Any) -> Any:
        """Record that tensors are lazy zeros, and return them."""
        for each in jax.tree.leaves(zeros):
            self._lazy_zeros[each] = None
        return zeros

    def _has_lazy_zeros(self, func: OpOverload, args: tuple) -> bool:
        """Return whether torch returns lazy zeros, because an argument is lazy zeros."""
        lazy = [isinstance(x, torch.Tensor) and x in self._lazy_zeros for x in args]
        if func is torch.ops.aten.div.Tensor:
            return lazy[0] and not lazy[1]
        return any(lazy) and (func in _PRODUCTS or func.is_view)


def _margin_of_one(func: OpOverload, x: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return a margin loss of one sample, a result without axes, from the loss of a batch of one."""
    out = func(x.reshape(1, -1), target.reshape(1, *target.shape), *args, **kwargs)
    return out.reshape(()) if isinstance(out, torch.Tensor) else (out[0].reshape(()), out[1].reshape(target.shape))


def _is_empty(leaf: Any) -> bool:
    """Return whether an argument is a tensor without elements whose sizes are all known."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return False
    sizes = [size for size in leaf.shape if isinstance(size, int)]
    return 0 in sizes and len(sizes) == leaf.dim()


def _run_on_empty(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
    """Run an operator on real tensors if none of its tensors has elements, to raise the errors that torch raises."""
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags or schema_of(func).is_mutable:
        return
    if func.is_view or torch.Tag.view_copy in func.tags:  # the viewed memory may have elements
        return
    leaves = jax.tree.leaves((args, kwargs))
    if any(isinstance(leaf, SYMBOLIC_NUMBERS) for leaf in leaves):
        return
    if any(leaf.device.type != "cpu" or not _is_empty(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)):
        return

    def real(leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf

    with outside_modes(), torch.no_grad():
        func(*jax.tree.map(real, args), **jax.tree.map(real, kwargs))


def _result_without_elements(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the result of an operator of :data:`_FAIL_ON_EMPTY`, traced as a new tensor if it has no elements."""

    def real(leaf: Any) -> Any:
        return torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf

    with outside_modes(), torch.no_grad():
        found = func(*jax.tree.map(real, args), **jax.tree.map(real, kwargs))
    if found.numel():
        return func(*args, **kwargs)
    return args[0].new_zeros(found.shape, dtype=found.dtype)


def _with_real_strides(func: OpOverload, args: tuple, kwargs: dict[str, Any], out: Any) -> Any:
    """Return the results of an operator, copied to the strides that torch gives them on a CPU.

    The strides are those of a run on real tensors, which takes place if an argument is not contiguous.
    """
    if draws(func, args, kwargs):
        return out
    leaves = jax.tree.leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(tensor.layout is not torch.strided or tensor.device.type != "cpu" for tensor in tensors):
        return out
    sizes = [size for tensor in tensors for size in (*tensor.shape, *tensor.stride())]
    if any(isinstance(each, SYMBOLIC_NUMBERS) for each in (*leaves, *sizes)):
        return out
    if all(tensor.is_contiguous() for tensor in tensors):
        return out
    # For a channels-last input, the fake results of batch norm have the strides of the real ones.
    if "batch_norm" in schema_of(func).name and _has_channels_last_layout(tensors[0]):
        return out

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).fill_(1)

    with outside_modes(), torch.no_grad():
        found = func(*jax.tree.map(real, args), **jax.tree.map(real, kwargs))
    return jax.tree.map(lambda x, of: _copied_like(x, of) if isinstance(of, torch.Tensor) else x, out, found)


def _has_channels_last_layout(x: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def _copied_like(x: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the strides of another tensor of the same shape; the tensor itself if it has them."""
    if (
        x.shape != of.shape
        or not x.numel()
        or all(size == 1 or ours == theirs for size, ours, theirs in zip(x.shape, x.stride(), of.stride(), strict=True))
    ):
        return x
    order = sorted(range(x.dim()), key=lambda axis: (of.stride(axis), of.shape[axis]), reverse=True)
    back = sorted(range(x.dim()), key=order.__getitem__)
    return x.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
