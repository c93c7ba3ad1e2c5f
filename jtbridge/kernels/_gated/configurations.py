"""Launch configurations of the gated activations, the same for all shapes because the kernels are elementwise."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GatedConfiguration:
    """The elements that a program takes, and its warps."""

    block: int
    warps: int


def default() -> GatedConfiguration:
    """Return the default configuration: 8 elements for each thread, which are 16 bytes of float16."""
    return GatedConfiguration(1024, 4)


def candidates() -> list[GatedConfiguration]:
    """Return the configurations that tuning tries, the default first. They have 4 to 16 elements per thread.

    4 elements of float32 are 16 bytes.
    """
    return [
        default(),
        *(GatedConfiguration(*each) for each in ((1024, 8), (2048, 4), (2048, 8), (4096, 8))),
    ]
