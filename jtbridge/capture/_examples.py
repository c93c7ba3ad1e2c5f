"""Example arguments for untraceable functions, whose result types come from runs on these arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

Example = Callable[..., torch.Tensor]  # makes a tensor from a shape and the keywords `dtype` and `device`


def example_arguments(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], device: str
) -> Iterator[list[torch.Tensor]]:
    """Yield three sets of arguments: zeros, ones, and mixed numbers.

    A result whose shape depends on data rarely has the same shape for all three sets. The integers of the third set are
    2 and 1 in descending order, because these are valid as lengths of sequences, indices and tokens.
    """
    for make in EXAMPLES:
        yield [make(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)]


def _mixed_numbers(shape: Sequence[int], *, dtype: torch.dtype, device: str) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if dtype is torch.bool or not (dtype.is_floating_point or dtype.is_complex):
        values = torch.arange(count) * 2 < count
        return (values if dtype is torch.bool else values + 1).reshape(shape).to(device, dtype)
    # Quadratic residues: numbers of both signs in no order, the same in every process, without a generator.
    return (((torch.arange(count) * 37 + 11) ** 2 % 101 - 50) / 25).reshape(shape).to(device, dtype)


EXAMPLES: tuple[Example, ...] = (torch.zeros, torch.ones, _mixed_numbers)
