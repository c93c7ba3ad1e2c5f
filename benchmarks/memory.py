"""The memory that a call with a large array takes in addition to the array."""

import jax
import jax.numpy as jnp
import torch

from benchmarks._contestants import WRAPPERS
from benchmarks._measure import PeakMemory, in_child
from benchmarks._results import DLPACK, TORCH, Options, Row, Target

_FLOATS = 2**27  # 512 MB


def _read(x: torch.Tensor) -> torch.Tensor:
    return x[:: 2**20].sum()


def peaks(name: str) -> tuple[float, float]:
    """Return the extra megabytes of a jitted call, and of its tracing and compilation. Call it in a fresh process."""
    if name == TORCH:
        function, x = _read, torch.ones(_FLOATS)
    else:
        function, x = jax.jit(WRAPPERS[name](_read, torch.ones(2**21))), jnp.ones(_FLOATS)
        jax.block_until_ready(function(jnp.ones(2**21)))  # imports and thread pools are not measured
    with PeakMemory() as compiling:
        compiled = function.lower(x).compile() if name != TORCH else function
    with PeakMemory() as calling:
        result = jax.block_until_ready(compiled(x))
    if float(result) != _FLOATS / 2**20:
        raise RuntimeError("wrong result")
    return calling.extra_mb, compiling.extra_mb


def call(options: Options) -> Row:
    """Measure the peak memory of the call itself, and note a compilation that needs much memory."""
    cells, notes = {}, []
    for name in (*WRAPPERS, TORCH):
        got = in_child("memory.peaks", name)
        cells[name] = got if not isinstance(got, list) else got[0]
        if isinstance(got, list) and got[1] > 64:
            notes.append(f"memory-512MB: tracing and compiling it with {name} takes {got[1]:.0f} MB")
    return Row(
        "memory-512MB",
        "peak extra memory, jit over a 512 MB array",
        "MB",
        cells,
        targets=(Target(DLPACK, 1),),
        notes=notes,
    )


ROWS = {"memory-512MB": call}
