"""Replacement, after a trace, of escaped fake tensors: those that the function stored during the trace."""

from __future__ import annotations

from typing import Any

import torch

from jtbridge._compat import FakeTensor, replace_fake, tensor_of_class
from jtbridge.core.runner import escaped_tensor_error


def replace(pairs: list[tuple[FakeTensor, torch.Tensor]]) -> None:
    """Replace fake tensors by other tensors, and remove these pairs from the list.

    A pair stays in the list if torch's own objects refer to the fake tensor.

    A view or a graph of a fake tensor refers to it until the view is replaced and freed. A failed replacement is
    therefore tried again after others have succeeded.
    """
    failed = 0
    while failed < len(pairs):
        fake, tensor = pairs.pop(0)
        try:
            replace_fake(fake, tensor)
            failed = 0
        except RuntimeError:
            pairs.append((fake, tensor))
            failed += 1
        del fake, tensor


class PoisonTensor(torch.Tensor):
    """Tensor that raises when it is used. It replaces an escaped fake tensor whose value is not known."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise escaped_tensor_error()

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]


def poison_tensor() -> torch.Tensor:
    """Return a tensor that raises when it is used, with an error that says why."""
    return tensor_of_class(PoisonTensor)
