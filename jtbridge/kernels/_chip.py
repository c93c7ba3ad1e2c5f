"""The GPU that a program is lowered for."""

from __future__ import annotations

import dataclasses

import jax

# Kilobytes of shared memory that a program may have, by compute capability. Source: CUDA C++ Programming Guide, table
# of technical specifications per compute capability.
_SHARED = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
_SHARED_OF_OTHERS = 64  # kilobytes, for AMD's GPUs


@dataclasses.dataclass(frozen=True)
class Chip:
    """A GPU.

    Args:
        name: the name that its driver reports, such as "NVIDIA H100 80GB HBM3".
        capability: compute capability, 90 for 9.0; None for a GPU that is not NVIDIA's.
    """

    name: str
    capability: int | None

    def before(self, capability: int) -> bool:
        """Return whether the GPU is NVIDIA's and has a lower compute capability."""
        return self.capability is not None and self.capability < capability

    def precision(self, wanted: str) -> str:
        """Return the matmul precision of ``tl.dot`` for float32: `wanted`, or "ieee" without NVIDIA's tensor cores."""
        return "ieee" if self.capability is None else wanted

    @property
    def shared(self) -> int:
        """The bytes of shared memory that a program may have."""
        if self.capability is None:
            return _SHARED_OF_OTHERS * 1024
        known = [c for c in _SHARED if c <= self.capability]
        return _SHARED[max(known)] * 1024 if known else 48 * 1024


def present() -> Chip | None:
    """Return the first GPU of this process, for which jax-triton compiles; None without a GPU."""
    for platform in ("cuda", "rocm"):
        try:
            device = jax.local_devices(backend=platform)[0]
        except (RuntimeError, IndexError):
            continue
        words = str(device.compute_capability).split(".")
        return Chip(device.device_kind, int("".join(words)) if len(words) == 2 else None)
    return None


def target() -> Chip:
    """Return the chip that defaults are chosen for: this process's GPU, or an H100 in a process without a GPU."""
    return present() or Chip("NVIDIA H100", 90)
