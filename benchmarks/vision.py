"""Convolutional networks, in which torch runs the convolutions inside the translated program."""

from functools import partial

from benchmarks._networks import CONVOLUTIONAL
from benchmarks._results import ISLANDS, TORCH, Benchmark, Target
from benchmarks.models import forward, gradient

_FORWARD, _GRADIENT = (Target(ISLANDS, 0.95, TORCH),), (Target(ISLANDS, 1.05, TORCH),)
ROWS: dict[str, Benchmark] = {
    f"{name}-{kind}": partial(run, name, targets)
    for name in CONVOLUTIONAL
    for kind, run, targets in (("forward", forward, _FORWARD), ("gradient", gradient, _GRADIENT))
}
