"""Torch's settings, most of them thread-local, as they were when a call was traced.

XLA runs a callback on its own thread, or on whichever thread waits for the result. The grad mode, autocast,
inference mode, default device and default dtype of that thread may differ from those of the traced program.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch

from jtbridge._compat import any_autocast, has_torch_modes
from jtbridge.errors import DTypeError

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True)
class TorchState:
    """Hashable snapshot of the settings that change torch's results. It is part of the key of a traced function."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]  # device types with autocast on, and their dtype
    dtype: torch.dtype | None  # the default dtype; None for a function that does not depend on it
    device: torch.device | None  # None: torch's own default
    matmul_precision: str  # how float32 is multiplied on a GPU: "highest", "high" or "medium"

    @classmethod
    def current(cls) -> TorchState:
        """Return the settings of this thread."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (name, torch.get_autocast_dtype(name)) for name in _AUTOCAST_DEVICES if torch.is_autocast_enabled(name)
            ),
            dtype=torch.get_default_dtype(),
            device=torch.get_default_device() if has_torch_modes() else None,
            matmul_precision=_matmul_precision(),
        )

    def activity_check(self) -> Callable[[], bool]:
        """Return a function that tests whether this thread has these settings already. It runs before every call."""
        if self.device is not None or self.autocast:
            return lambda: False
        grad, inference, dtype = self.grad, self.inference, self.dtype
        grad_now, inference_now, dtype_now, autocast_now, modes_now = (
            torch.is_grad_enabled,
            torch.is_inference_mode_enabled,
            torch.get_default_dtype,
            any_autocast,
            has_torch_modes,
        )

        def is_active() -> bool:
            return (
                grad_now() is grad
                and inference_now() is inference
                and (dtype is None or dtype_now() is dtype)
                and not modes_now()
                and not autocast_now()
            )

        return is_active

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Give this thread these settings inside the block, and restore its own afterwards, also after an exception.

        Raises:
            DTypeError: the default dtype differs. Torch has one default dtype for all threads, so it is not changed.
        """
        if self.dtype not in (None, torch.get_default_dtype()):
            raise DTypeError(
                f"A torch function that makes tensors of torch's default dtype was traced while that was {self.dtype}, "
                f"and now it is {torch.get_default_dtype()}. Torch has one default dtype for all threads, so it is not "
                f"changed for this call. Pass `dtype=` where the function makes tensors, call "
                f"`torch.set_default_dtype({self.dtype})` before the program runs, or trace the program again."
            )
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            wanted = dict(self.autocast)
            for name in _AUTOCAST_DEVICES:
                if name in wanted or torch.is_autocast_enabled(name):
                    stack.enter_context(torch.autocast(name, dtype=wanted.get(name), enabled=name in wanted))
            if self.device is not None or has_torch_modes():
                stack.enter_context(torch.device(self.device or "cpu"))
            yield

    def for_any_default_dtype(self) -> TorchState:
        """Return the same settings for a function that does not depend on the default dtype."""
        return dataclasses.replace(self, dtype=None)

    def by_default_on(self, device: str) -> TorchState:
        """Return the settings with `device` for new tensors; unchanged if the user has set a device, or for "cpu"."""
        if device == "cpu" or self.device is not None:
            return self
        return dataclasses.replace(self, device=torch.device(device))

    def without_grad(self) -> TorchState:
        """Return the same settings with gradient recording off."""
        return dataclasses.replace(self, grad=False)

    def differentiable(self) -> TorchState:
        """Return the same settings with gradient recording on, for derivatives, whatever was set around the call."""
        return dataclasses.replace(self, grad=True, inference=False)

    def without_casts(self) -> TorchState:
        """Return the settings for a graph captured after autocast: no gradient recording and no second cast."""
        return dataclasses.replace(self, grad=False, inference=False, autocast=())


def _matmul_precision() -> str:
    """Return the matmul precision of float32 on a GPU.

    Torch also has one precision for each of its backends. If they differ, torch has no name for the mixture and raises;
    then the precision of CUDA's matmul is returned.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"
