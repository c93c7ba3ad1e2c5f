"""Torch's forward mode, which has one level per process. Tried on torch 2.13; only the level itself is public."""

from __future__ import annotations

import torch
import torch._C._functorch as functorch_bindings
from torch._functorch import eager_transforms
from torch.autograd import forward_ad


def in_forward_mode() -> bool:
    """Return whether any thread is in torch's forward mode."""
    return forward_ad._current_level >= 0


def forward_mode() -> str | None:
    """Return the forward mode that some thread is in: "torch.func", "forward_ad" or None."""
    return None if not in_forward_mode() else "torch.func" if eager_transforms.JVP_NESTING else "forward_ad"


def thread_in_forward_mode() -> bool:
    """Return whether this thread may be in torch's forward mode, for code that runs outside of torch dispatch modes.

    Torch tells which thread runs a transform of torch.func. It does not tell which thread uses `forward_ad`, so such a
    use counts for every thread.
    """
    if not in_forward_mode() or not eager_transforms.JVP_NESTING:
        return in_forward_mode()
    stack = functorch_bindings.get_interpreter_stack() or []
    return any(interpreter.key() == functorch_bindings.TransformType.Jvp for interpreter in stack)


def enter_shared_level() -> None:
    """Enter torch's forward mode; torch.func then uses this level, on any thread.

    Raises:
        RuntimeError: another thread is in forward mode.
    """
    forward_ad.enter_dual_level()
    eager_transforms.JVP_NESTING += 1


def level_is_shared() -> bool:
    """Return whether torch.func uses the level of :func:`enter_shared_level`."""
    return eager_transforms.JVP_NESTING > 1


def exit_shared_level() -> None:
    """Leave the level of :func:`enter_shared_level`."""
    eager_transforms.JVP_NESTING -= 1
    forward_ad.exit_dual_level()


def dual() -> torch.Tensor:
    """Return a tensor whose tangent is lost when the level ends."""
    with forward_ad._set_fwd_grad_enabled(True):
        return forward_ad.make_dual(torch.zeros(()), torch.ones(()))


def has_tangent_at_any_level(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a tangent, also inside a graph of torch.compile.

    Such a graph enters a level of forward mode in C++ only, so :func:`in_forward_mode` is false. Tried on torch 2.13,
    which has one level, 0.
    """
    return torch._VF._unpack_dual(tensor, level=0)[1] is not None  # type: ignore[attr-defined]


def has_tangent(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of :func:`dual` still has its tangent."""
    return in_forward_mode() and forward_ad.unpack_dual(tensor).tangent is not None
