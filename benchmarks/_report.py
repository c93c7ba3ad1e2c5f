"""The table of all rows, printed and as JSON."""

import importlib.metadata
import json
import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks._results import COLUMNS, Failed, Row

FOLDER = Path("build/bench")
PACKAGES = ("jtbridge", "jax", "torch", "wrap-torch2jax", "torchax", "numpy")


def machine(packages: tuple[str, ...] = PACKAGES) -> dict[str, Any]:
    """Return the machine and the versions that the numbers depend on."""
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load before": round(os.getloadavg()[0], 1),
        **versions,
    }


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """Print the table, and below it the reasons for missing cells, and notes."""
    from rich.console import Console
    from rich.table import Table

    reasons: list[str] = []
    title = ", ".join(f"{name} {fact}" for name, fact in facts.items())
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("", max_width=30)
    for name in COLUMNS:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    table.add_column("targets", max_width=40)
    for row in rows:
        table.add_row(row.title, *(_cell(row, name, reasons) for name in COLUMNS), row.verdict())
    lines = [f"[{n}] {reason}" for n, reason in enumerate(reasons, 1)] + [note for row in rows for note in row.notes]
    console = Console(width=None if Console().is_terminal else 190, highlight=False)
    console.print(table)
    if facts["load before"] > 0.5 * (os.cpu_count() or 1):
        console.print(
            "The machine was busy with other work: see the ratios, of a run with OMP_NUM_THREADS=1 and --clock cpu."
        )
    console.print("In brackets: times the value of the contestant that the row's first target names.", style="dim")
    for line in lines:
        console.print(line, markup=False)


def _cell(row: Row, name: str, reasons: list[str]) -> str:
    cell = row.cells.get(name)
    if cell is None:
        return ""
    if isinstance(cell, Failed):
        if cell.reason not in reasons:
            reasons.append(cell.reason)
        return rf"none \[{reasons.index(cell.reason) + 1}]"
    ratio = row.ratio(name)
    value = f"{cell:.3g}" if abs(cell) < 100 else f"{cell:,.0f}"
    return f"{value} {row.unit}" + (f"\n({ratio:.2f}x)" if ratio is not None else "")


def write(rows: list[Row], facts: dict[str, Any]) -> Path:
    """Write build/bench/TIME.json, so that runs can be compared later."""
    results = [
        {
            "key": row.key,
            "title": row.title,
            "unit": row.unit,
            "against": row.against,
            "targets": [asdict(target) for target in row.targets],
            "verdict": row.verdict().splitlines(),
            "values": {n: c for n, c in row.cells.items() if not isinstance(c, Failed)},
            "ratios": {n: r for n in row.cells if (r := row.ratio(n)) is not None},
            "failed": {n: c.reason for n, c in row.cells.items() if isinstance(c, Failed)},
            "notes": row.notes,
        }
        for row in rows
    ]
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{str(facts['time']).replace(':', '')}.json"
    path.write_text(json.dumps({"machine": facts, "rows": results}, indent=2))
    return path
