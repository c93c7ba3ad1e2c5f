"""Traits of a sample, found by running it in torch: random, uninitialised, data-dependent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .reference import run
from .samples import NotApplicableError, Sample
from .trees import leaves

# Operators that return uninitialised memory, whose values cannot be compared.
UNINITIALISED = frozenset(
    {
        *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
        *("resize_", "resize_as_"),
    }
)
_SEEDS = range(1, 9)


@dataclass(frozen=True)
class Traits:
    """`random`: the result depends on the seed. `draws`: a key is asked for, even where it has no effect."""

    draws: bool
    random: bool
    uninitialised: bool
    shape_depends_on_data: bool

    @property
    def values_compare(self) -> bool:
        return not self.random and not self.uninitialised


class _TagRecorder(TorchDispatchMode):
    """Collects the tags of the ATen operators that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[torch.Tag] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tags.update(func.tags)
        return func(*args, **(kwargs or {}))


def traits(sample: Sample) -> Traits:
    with _TagRecorder() as recorder:
        out = run(sample.function, sample.tensors)
    draws = torch.Tag.nondeterministic_seeded in recorder.tags
    return Traits(
        draws=draws,
        random=draws and _varies_with_seed(sample.function, sample.tensors),
        uninitialised=sample.operator.partition(".")[0] in UNINITIALISED or _is_nan_on_this_cpu(sample.operator, out),
        shape_depends_on_data=torch.Tag.dynamic_output_shape in recorder.tags
        or _shape_depends_on_data(sample.function, sample.tensors, out),
    )


def _is_nan_on_this_cpu(operator: str, out: Any) -> bool:
    """Return whether torch's kernel for float8 gives NaN for all numbers, as it does on some CPUs (torch 2.13)."""
    return operator == "torch._scaled_mm" and all(bool(leaf.float().isnan().all()) for leaf in leaves(out))


def _varies_with_seed(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> bool:
    results = []
    for seed in _SEEDS:
        torch.manual_seed(seed)
        results.append([_key(leaf) for leaf in leaves(run(function, tensors))])
    return any(result != results[0] for result in results)


def _key(leaf: Any) -> Any:
    return str(leaf.tolist()) if isinstance(leaf, torch.Tensor) else leaf


def _shape_depends_on_data(function: Callable[..., Any], tensors: Sequence[torch.Tensor], out: Any) -> bool:
    """Return whether only the real inputs determine the output's shape, so that a caller has to give it.

    A library can run the function on fake tensors, and where that fails once on zeros; only where zeros give
    another answer than the data (the indices of the nonzero elements, say) is the shape handed to it.
    """
    mode = FakeTensorMode()
    try:
        with mode:
            function(*(mode.from_tensor(tensor) for tensor in tensors))
    except Exception:  # noqa: BLE001 - whatever the reason, fake tensors did not tell
        try:
            on_zeros = run(function, [torch.zeros_like(tensor) for tensor in tensors])
        except NotApplicableError:
            return True
        return _shapes(on_zeros) != _shapes(out)
    return False


def _shapes(result: Any) -> list[Any]:
    return [leaf.shape if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves(result)]
