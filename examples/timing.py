"""Timing for the examples: contestants in turn, a table, and a bar chart."""

import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

Calls = dict[str, Callable[[], object]]


def median_times(kinds: dict[str, Calls], rounds: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of a call, for each contestant of each kind ("forward", "gradient").

    The contestants of a kind take turns, so that a busy moment of the machine affects all of them. The first call of
    each contestant compiles and does not count.
    """
    bar = tqdm(total=len(kinds) * rounds, desc="timing", unit="round")
    medians = {}
    for kind, calls in kinds.items():
        bar.set_description(f"timing: {kind}")
        times: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            jax.block_until_ready(call())
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                jax.block_until_ready(call())
                times[name].append(1e3 * (time.perf_counter() - start))
            bar.update()
        medians[kind] = {name: float(np.median(t)) for name, t in times.items()}
    bar.close()
    return medians


def show_table(console: Console, title: str, times: dict[str, dict[str, float]], baseline: str) -> None:
    """Print a table of the times, with the ratio to the baseline's time in brackets."""
    table = Table(title=title, title_justify="left")
    table.add_column()
    for kind in times:
        table.add_column(kind, justify="right")
    for name in next(iter(times.values())):
        table.add_row(name, *(f"{t[name]:.1f} ms ({t[name] / t[baseline]:.2f}x)" for t in times.values()))
    console.print(table)


def save_chart(path: Path, title: str, times: dict[str, dict[str, float]]) -> None:
    """Save a picture with a group of horizontal bars for each kind."""
    import matplotlib

    matplotlib.use("Agg")  # writes files, opens no window
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(times), figsize=(11, 3), sharey=True, layout="constrained")
    for axis, (kind, medians) in zip(axes, times.items(), strict=True):
        bars = axis.barh(list(medians), list(medians.values()), color=["#888888", "#2b6cb0", "#63a4d8", "#d0a050"])
        axis.bar_label(bars, fmt="%.1f ms", padding=3)
        axis.set(title=kind, xlabel="milliseconds", xlim=(0, 1.2 * max(medians.values())))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()  # shared: the first contestant on top
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
