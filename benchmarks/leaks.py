"""Whether memory stays flat over many functions, and over many calls."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch

from benchmarks._contestants import WRAPPERS
from benchmarks._measure import in_child, resident_mb
from benchmarks._results import DLPACK, XLA, Cell, Options, Row, Target

# JAX alone runs the same: memory that JAX itself keeps does not count against the contestants.
_JAX = "jax alone"


def _wrapper(name: str) -> Callable:
    return (lambda fn, *examples: fn) if name == _JAX else WRAPPERS[name]


def functions(name: str, count: int) -> float:
    """Return the kilobytes kept for each of `count` functions that are wrapped, jitted, called and dropped.

    Call it in a fresh process.
    """
    wrap, a, x = _wrapper(name), torch.ones(16), jnp.ones(16)

    def once() -> None:
        jax.jit(wrap(lambda a, b: a + b, a, a))(x, x).block_until_ready()

    return 1024 * _growth(once, count, warm=200) / count


def calls(name: str, count: int) -> float:
    """Return the megabytes gained over `count` calls of one jitted function. Call it in a fresh process."""
    wrap, a, x = _wrapper(name), torch.ones(16), jnp.ones(16)
    function = jax.jit(wrap(lambda a, b: a + b, a, a))
    return _growth(lambda: function(x, x).block_until_ready(), count, warm=5_000)


def _growth(once: Callable[[], None], count: int, warm: int) -> float:
    for _ in range(warm):
        once()
    before = resident_mb()
    for done in range(count):
        once()
        if done % 500 == 499 and resident_mb() - before > 2048:
            raise RuntimeError(f"stopped after {done + 1:,} times: it had kept more than 2 GB")
    return resident_mb() - before


def many_functions(options: Options) -> Row:
    """Measure the memory kept for each function, for `dlpack` over ten times as many functions as for the others."""
    count = 200 if options.quick else 1_000
    counts = dict.fromkeys((*WRAPPERS, _JAX), count) | {DLPACK: 10 * count}
    cells = {name: in_child("leaks.functions", name, n) for name, n in counts.items()}
    note = f"leak-functions: over {counts[DLPACK]:,} functions for {DLPACK}, over {count:,} for the others"
    title = "memory kept per function wrapped, jitted, called, dropped"
    return _row("leak-functions", title, "KB", cells, target=4, note=note)


def many_calls(options: Options) -> Row:
    """Measure the memory gained over many calls of one function."""
    count = 10_000 if options.quick else 100_000
    cells = {name: in_child("leaks.calls", name, count) for name in (*WRAPPERS, _JAX)}
    return _row("leak-calls", f"memory growth over {count:,} calls of one function", "MB", cells, target=1)


def _row(key: str, title: str, unit: str, cells: dict[str, Cell], target: float, note: str = "") -> Row:
    alone = cells.pop(_JAX)
    told = f"{key}: JAX alone, without torch, {alone:.2f} {unit}" if isinstance(alone, float) else f"{key}: {alone}"
    targets = (Target(DLPACK, target), Target(XLA, target))
    return Row(key, title, unit, cells, targets=targets, notes=[told, *filter(None, [note])])


ROWS = {"leak-functions": many_functions, "leak-calls": many_calls}
