"""What a function kept of a trace, when that is over: other tensors in the place of those without values."""

from __future__ import annotations

from typing import Any

import torch

from jtbridge._compat import FakeTensor, replace_fake, tensor_of_class
from jtbridge._run import KEPT
from jtbridge.errors import MutationError


def replace(pairs: list[tuple[FakeTensor, torch.Tensor]]) -> None:
    """Put tensors in the place of others, as far as torch itself does not refer to those.

    What was made of a tensor refers to it until it is replaced itself, and gone: the list is emptied.
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
    """What stands where a tensor without a value was kept."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise MutationError(KEPT)

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]


def poison_tensor() -> torch.Tensor:
    """A tensor that says why it cannot be used."""
    return tensor_of_class(PoisonTensor)
