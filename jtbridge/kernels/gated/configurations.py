"""How the kernels are launched, whatever the shape: they are elementwise."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GatedConfiguration:
    """Elements that a program takes, and its warps."""

    block: int
    warps: int


def default() -> GatedConfiguration:
    """What is taken where nothing was tuned: 8 elements for each thread, 16 bytes of float16."""
    return GatedConfiguration(1024, 4)


def candidates() -> list[GatedConfiguration]:
    """What tuning tries: from 4 elements for each thread, 16 bytes of float32, to 16, and larger programs."""
    return [default(), *(GatedConfiguration(*each) for each in ((1024, 8), (2048, 4), (2048, 8), (4096, 8)))]
