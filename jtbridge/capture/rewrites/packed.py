"""Packed sequences whose lengths are known while tracing, for example as numbers in user code.

Torch's own operators for packed sequences read the lengths, and torch has no rules to differentiate or batch them.
The functions here select rows by constant indices instead. ``counts`` is torch's `batch_sizes`: for each step, the
number of sequences that have this step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jtbridge._compat import FakeTensor, pack_padded_sequence, pad_packed_sequence


def known_integers(tensor: Any) -> list[int] | None:
    """Return the numbers in a 1-d tensor with values, or in a tensor made from a list while tracing; else None."""
    if not isinstance(tensor, FakeTensor):
        return [int(x) for x in tensor.tolist()] if tensor.dim() == 1 else None
    return noted_values(tensor)


def noted_values(tensor: Any) -> list[int] | None:
    """Return the numbers in a tensor that was made from a list while tracing; else None."""
    return getattr(tensor, "known_values", None)


def _known(values: Sequence[int]) -> torch.Tensor:
    """Return a tensor made from a list, with the list in its attribute `known_values`."""
    tensor = torch.tensor(values)
    tensor.known_values = list(values)  # type: ignore[attr-defined]
    return tensor


def _of_list(make: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return a replacement of `make` that notes the values of a tensor made from a list of ints.

    A list of fake tensors with one element each is stacked: torch would read their memory.
    """

    def run(data: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, list | tuple) and data and all(isinstance(x, FakeTensor) and not x.dim() for x in data):
            return NotImplemented if args or kwargs.keys() - {"dtype", "device"} else _stacked(data, **kwargs)
        if not isinstance(data, list | tuple) or not data or not all(type(x) is int for x in data):
            return NotImplemented
        tensor = make(data, *args, **kwargs)
        tensor.known_values = list(data)  # type: ignore[attr-defined]
        return tensor

    return run


def _stacked(data: Sequence[torch.Tensor], dtype: Any = None, device: Any = None) -> torch.Tensor:
    dtype = dtype or functools.reduce(torch.promote_types, [x.dtype for x in data])
    return torch.stack([x.detach().to(dtype=dtype, device=device) for x in data])


def _sort(input: torch.Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    values = noted_values(input)
    if values is None or dim not in (-1, 0):
        return NotImplemented
    order = sorted(range(len(values)), key=values.__getitem__, reverse=descending)
    return torch.return_types.sort((_known([values[i] for i in order]), _known(order)))


def lengths_of(counts: Sequence[int]) -> list[int]:
    """Return the length of each sequence."""
    return [sum(count > row for count in counts) for row in range(counts[0])]


def pad_packed(data: torch.Tensor, counts: Sequence[int], value: float, steps: int | None = None) -> torch.Tensor:
    """Return ``[step, sequence, ...]`` from ``data[position, ...]``, with `value` after the end of a sequence."""
    steps, rows = len(counts) if steps is None else steps, counts[0]
    positions, start = [], 0
    for count in [*counts, *[0] * (steps - len(counts))]:
        positions += [*range(start, start + count), *[len(data)] * (rows - count)]
        start += count
    with_value = torch.cat([data, data.new_full((1, *data.shape[1:]), value)])
    return with_value.index_select(0, torch.tensor(positions)).unflatten(0, (steps, rows))


def packed(x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return ``data`` from the padded ``[step, sequence, ...]``: the inverse of :func:`pad_packed`."""
    rows = x.shape[1]
    positions = [step * rows + row for step, count in enumerate(counts) for row in range(count)]
    return x.flatten(0, 1).index_select(0, torch.tensor(positions))


def _pack_padded_sequence(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    ends = known_integers(lengths)
    x = x.transpose(0, 1) if batch_first else x
    if (
        not ends
        or len(ends) != x.shape[1]
        or ends != sorted(ends, reverse=True)
        or not 0 < ends[-1] <= ends[0] <= len(x)
    ):
        return NotImplemented  # torch's operator raises for wrong lengths
    counts = [sum(end > step for end in ends) for step in range(ends[0])]
    return packed(x, counts), _known(counts)


def _pad_packed_sequence(
    data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, value: float, total_length: int
) -> Any:
    counts = known_integers(sizes)
    if not counts or 0 < total_length < len(counts):
        return NotImplemented
    x = pad_packed(data, counts, value, max(total_length, len(counts)))
    return x.transpose(0, 1) if batch_first else x, _known(lengths_of(counts))


# For each function of torch, a replacement, which returns NotImplemented where torch's own function is to run.
REPLACEMENTS = {
    torch.tensor: _of_list(torch.tensor),
    torch.as_tensor: _of_list(torch.as_tensor),
    torch.sort: _sort,
    pack_padded_sequence: _pack_padded_sequence,
    pad_packed_sequence: _pad_packed_sequence,
}
