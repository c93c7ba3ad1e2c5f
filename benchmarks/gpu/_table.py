"""The tables, printed and as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from benchmarks._report import FOLDER
from benchmarks._results import Failed

from ._rows import Row


def show(title: str, rows: list[Row]) -> None:
    """Print a table with a line for each contestant and its targets. Without `rich`, print plain text."""
    lines = [
        (row.title if i == 0 else "", *line, i + 1 == len(row.cells))
        for row in rows
        for i, line in enumerate(row.lines())
    ]
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(f"\n{title}")
        for case, name, value, target, _ in lines:
            print(f"{case:60} {name:18} {value:>14}  {target.replace(chr(10), '; ')}")
        return
    table = Table(title=title, title_justify="left")
    for name, options in _COLUMNS.items():
        table.add_column(name, **options)
    for case, name, value, target, last in lines:
        table.add_row(*(Text(cell) for cell in (case, name, value, target)), end_section=last)
    console = Console(width=None if Console().is_terminal else 170, highlight=False)
    console.print(table)
    for note in (note for row in rows for note in row.notes):
        console.print(note, markup=False)


_COLUMNS: dict[str, Any] = {
    "": {"max_width": 44},
    "contestant": {"no_wrap": True},
    "result": {"justify": "right", "max_width": 50},
    "target": {"max_width": 60},
}


def write(rows: list[Row], facts: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Write gpu-TIME.json, so that runs can be compared later."""
    results = [
        {
            "key": row.key,
            "title": row.title,
            "unit": row.unit,
            "values": {name: cell for name, cell in row.cells.items() if not isinstance(cell, Failed)},
            "failed": {name: cell.reason for name, cell in row.cells.items() if isinstance(cell, Failed)},
            "targets": [dataclasses.asdict(goal) | {"score": goal.score(row.cells)} for goal in row.goals],
            "notes": row.notes,
        }
        for row in rows
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-{str(facts['time']).replace(':', '')}.json"
    path.write_text(json.dumps({"machine": facts, "rows": results}, indent=2))
    return path
