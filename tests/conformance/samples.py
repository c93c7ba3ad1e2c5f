"""The case table: operators and some samples of each from PyTorch's operator database."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.testing._internal import common_methods_invocations as database
from torch.utils import _pytree as torch_pytree

from .convert import jax_unsupported_reason, plain

# The first sample and others evenly spread up to the last: the first samples are mostly 0-d tensors and options at
# their defaults (dropout with p=0).
SAMPLES_PER_OPERATOR = 3
# An operator uses the first of these dtypes that it supports on the CPU, or any supported dtype if it supports none.
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)


class NotApplicableError(Exception):
    """Torch itself has no reference for a case, or JAX has no array for it. The message is the reason."""


@dataclass(frozen=True)
class Sample:
    """One sample of one operator as a function of its tensors; everything else is closed over."""

    operator: str
    index: int
    function: Callable[..., Any]
    # `function`, then the part of its result that OpInfo says has a derivative: without the phase of singular
    # vectors, for example. Derivatives are taken of this one.
    differentiable: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]


def operators() -> dict[str, Any]:
    """Return every OpInfo by its full name: the operator's name, and the variant's after a dot."""
    # The database seeds torch inside most random operators, which would hide that they are random.
    database.wrapper_set_seed = _unseeded
    table = {info.full_name: info for info in database.op_db}
    if len(table) != len(database.op_db):
        raise RuntimeError("Two operators of PyTorch's database have one name.")
    return table


def _unseeded(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


def dtype_for(info: Any, dtype: torch.dtype | None) -> torch.dtype:
    """Return `dtype` if the operator supports it on the CPU; for None, return the first dtype that it supports."""
    supported = info.supported_dtypes("cpu")
    if dtype is not None:
        if dtype not in supported:
            raise NotApplicableError(f"torch: the operator does not support {dtype} on CPU")
        return dtype
    for candidate in (*DTYPES, *sorted(supported, key=str)):
        if candidate in supported:
            return candidate
    raise NotApplicableError("torch: the operator supports no dtype on CPU")


def chosen_samples(info: Any, dtype: torch.dtype, count: int = SAMPLES_PER_OPERATOR) -> Iterator[tuple[int, Any]]:
    """Return OpInfo samples with their indices: the same in every run, whichever operators are selected."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    drawn = list(info.sample_inputs("cpu", dtype, requires_grad=False))
    last = len(drawn) - 1
    steps = max(count - 1, 1)
    for index in sorted({round(last * step / steps) for step in range(count)} - {-1}):
        yield index, drawn[index]


def as_function(info: Any, index: int, sample: Any) -> Sample:
    """Return an OpInfo sample as a function of its tensors; raise :class:`NotApplicableError` if JAX lacks a dtype."""
    leaves, tree = torch_pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    statics = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def function(*tensors: torch.Tensor) -> Any:
        filled = list(statics)
        for i, tensor in zip(at, tensors, strict=True):
            filled[i] = tensor
        first, args, kwargs = torch_pytree.tree_unflatten(filled, tree)
        return info.op(first, *args, **kwargs)

    def differentiable(*tensors: torch.Tensor) -> Any:
        return sample.output_process_fn_grad(function(*tensors))

    function.__name__ = differentiable.__name__ = info.full_name
    for i in at:
        if reason := jax_unsupported_reason(leaves[i]):
            raise NotApplicableError(f"an input: {reason}")
    tensors = tuple(plain(leaves[i]) for i in at)
    return Sample(info.full_name, index, function, differentiable, tensors)
