"""Refusal of shapes and numbers that torch accepts on fake tensors, and refuses on real ones (torch 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from jtbridge._compat import OpOverload


def check_shapes(func: OpOverload, args: tuple) -> None:
    """Raise for arguments that an operator of torch refuses.

    Raises:
        RuntimeError, IndexError: as torch does.
    """
    check = _CHECKS.get(func)
    if check is not None:
        check(*args)


def check_masks(x: torch.Tensor, indices: Sequence[torch.Tensor | None], *_: Any) -> None:
    """Raise if a mask among the indices of a tensor has other sizes than the dimensions that it selects from.

    Raises:
        IndexError: as torch does.
    """
    first = 0  # dimension that the next index selects from
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):  # not a mask
            first += 1
            continue
        for axis, (size, wanted) in enumerate(zip(index.shape, x.shape[first:], strict=False)):
            if isinstance(size, int) and isinstance(wanted, int) and size != wanted:
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index {axis} does not match the shape of the "
                    f"indexed tensor {list(x.shape)} at index {first + axis}"
                )
        first += index.dim()


def _check_addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: Any) -> None:
    _check_expands(bias.shape, (a.shape[0], b.shape[1]))


def _check_addmv(bias: torch.Tensor, matrix: torch.Tensor, *_: Any) -> None:
    _check_expands(bias.shape, (matrix.shape[0],))


def _check_expands(shape: Sequence[int], to: Sequence[int]) -> None:
    sizes = zip(reversed(shape), reversed(to), strict=False)
    known = ((size, wanted) for size, wanted in sizes if isinstance(size, int) and isinstance(wanted, int))
    if len(shape) > len(to) or any(size not in (1, wanted) for size, wanted in known):
        raise RuntimeError(f"a tensor of shape {tuple(shape)} cannot be added to a product of shape {tuple(to)}")


def _check_boundaries(x: Any, boundaries: torch.Tensor, *_: Any) -> None:
    if boundaries.dim() != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({boundaries.dim()})")


def _check_dimension(x: torch.Tensor, dim: int, *_: Any) -> None:
    count = max(x.dim(), 1)
    if not -count <= dim < count:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-count}, {count - 1}], but got {dim})")


def _check_diagonal(x: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> None:
    _check_part(torch.diagonal(x, offset, dim1, dim2), source)


def _check_selection(x: torch.Tensor, source: torch.Tensor, dim: int, index: int) -> None:
    _check_part(torch.select(x, dim, index), source)


def _check_slice(x: torch.Tensor, source: torch.Tensor, *where: Any) -> None:
    _check_part(torch.ops.aten.slice.Tensor(x, *where), source)


def _check_part(part: torch.Tensor, source: torch.Tensor) -> None:
    if all(isinstance(size, int) for size in (*part.shape, *source.shape)) and source.shape != part.shape:
        raise RuntimeError(
            f"expected src to have a size equal to the slice of self. src size = {list(source.shape)}, "
            f"slice size = {list(part.shape)}"
        )


def _check_index_vector(x: torch.Tensor, dim: int, index: torch.Tensor) -> None:
    if index.dim() > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    count = index.numel()
    if x.dim() == 0 and isinstance(count, int) and count != 1:
        raise RuntimeError(f"index_select(): Index to scalar can have only 1 value, got {count} value(s)")


def _check_put(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor, *_: Any) -> None:
    counts = source.numel(), index.numel()
    if all(isinstance(count, int) for count in counts) and counts[0] != counts[1]:
        raise IndexError(
            "put_(): Expected source and index to have the same number of elements, but got source.numel() = "
            f"{counts[0]}, index.numel() = {counts[1]}"
        )


def _check_strides(
    x: torch.Tensor, source: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> None:
    if any(not isinstance(number, int) for number in (*size, *stride, *x.shape, *x.stride())) or 0 in size:
        return
    first = x.storage_offset() if offset is None else offset
    needed = first + 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if needed > x.untyped_storage().nbytes() // x.element_size():
        raise RuntimeError(f"sizes {list(size)}, strides {list(stride)}, storage offset {first} are out of bounds")


def _check_sample_count(probabilities: torch.Tensor, count: int, *_: Any) -> None:
    if not probabilities.is_floating_point():
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {probabilities.dtype}")
    if count <= 0:
        raise RuntimeError(f"cannot sample n_sample <= 0 samples (n_sample={count})")
    if probabilities.shape[-1] > 1 << 24:
        raise RuntimeError("number of categories cannot exceed 2^24")


def _check_uniform_range(x: torch.Tensor, low: float = 0.0, high: float = 1.0) -> None:
    if low > high:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but found from={low} > to={high}")


def _check_probability(x: torch.Tensor, p: float = 0.5) -> None:
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")


_CHECKS: dict[OpOverload, Callable[..., None]] = {
    torch.ops.aten._log_softmax.default: _check_dimension,
    torch.ops.aten._safe_softmax.default: _check_dimension,
    torch.ops.aten._softmax.default: _check_dimension,
    torch.ops.aten.addmm.default: _check_addmm,
    torch.ops.aten.addmv.default: _check_addmv,
    torch.ops.aten.as_strided_scatter.default: _check_strides,
    torch.ops.aten.bernoulli.p: _check_probability,
    torch.ops.aten.bernoulli_.float: _check_probability,
    torch.ops.aten.bucketize.Tensor: _check_boundaries,
    torch.ops.aten.bucketize.Scalar: _check_boundaries,
    torch.ops.aten.cummax.default: _check_dimension,
    torch.ops.aten.cummin.default: _check_dimension,
    torch.ops.aten.diagonal_scatter.default: _check_diagonal,
    torch.ops.aten.index.Tensor: check_masks,
    torch.ops.aten.index_put.default: check_masks,
    torch.ops.aten.index_put_.default: check_masks,
    torch.ops.aten.index_select.default: _check_index_vector,
    torch.ops.aten.multinomial.default: _check_sample_count,
    torch.ops.aten.put.default: _check_put,
    torch.ops.aten.put_.default: _check_put,
    torch.ops.aten.select_scatter.default: _check_selection,
    torch.ops.aten.slice_scatter.default: _check_slice,
    torch.ops.aten.uniform.default: _check_uniform_range,
    torch.ops.aten.uniform_.default: _check_uniform_range,
}
