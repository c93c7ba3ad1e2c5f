"""A small network written for one row, batched by `vmap`."""

from itertools import pairwise

import jax
import torch

from benchmarks._contestants import wrap_all
from benchmarks._measure import microseconds
from benchmarks._results import DLPACK, TORCH, TORCHAX, XLA, Options, Row, Target

_SIZES = (64, 128, 128, 10)
_ROWS = 256


def _mlp(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for weight in weights[:-1]:
        x = torch.tanh(weight @ x)
    return weights[-1] @ x


def mlp(options: Options) -> Row:
    """Time `jit(vmap(f))` beside `torch.vmap(f)`."""
    torch.manual_seed(0)
    weights = [torch.randn(n, m) / m**0.5 for m, n in pairwise(_SIZES)]
    rows = torch.randn(_ROWS, _SIZES[0])
    calls = wrap_all(_mlp, weights, rows[0], then=lambda f: jax.jit(jax.vmap(f, in_axes=(None, 0))), on=(weights, rows))
    calls[TORCH] = lambda: torch.vmap(_mlp, (None, 0))(weights, rows)
    cells = microseconds(calls, options)
    targets = (Target(DLPACK, 1.5, TORCH), Target(XLA, 0.4, TORCH), Target(XLA, 1.0, TORCHAX))
    return Row("vmap-mlp", f"jit(vmap(MLP {'-'.join(map(str, _SIZES))})), {_ROWS} rows", "us", cells, TORCH, targets)


ROWS = {"vmap-mlp": mlp}
