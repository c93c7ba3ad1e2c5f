"""`python -m benchmarks.operators [--only NAME ...] [--write]`: time operators in torch, in XLA, and as islands.

``--write`` stores the measurements by which jtbridge chooses between XLA and an island.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import jax
import torch
from rich.console import Console
from rich.table import Table
from torch import fx
from tqdm import tqdm

import jtbridge
from benchmarks import _report
from benchmarks._contestants import to_jax
from benchmarks._measure import interleaved
from benchmarks._results import ISLANDS, TORCH, XLA, Failed
from benchmarks.operators._cases import Case, cases
from jtbridge.translate import Workload, forced_islands, workload_of

_FILE = Path(jtbridge.__file__).parent / "translate" / "measured" / f"{jax.default_backend()}.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operators", description=__doc__)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="cases whose operator and arguments contain this"
    )
    parser.add_argument("--write", action="store_true", help=f"store the measurements in {_FILE}")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    chosen = [
        case for case in cases() if any(part in f"{case.operator} {case.title}" for part in arguments.only or [""])
    ]
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for case in (bar := tqdm(chosen, unit="case", mininterval=5)):
        bar.set_description(str(case.operator))
        row = _measured(case, arguments.rounds)
        if isinstance(row, Failed):
            failures[f"{case.operator} {case.title}"] = row.reason
        else:
            rows.append(row)
            if arguments.write:  # a run takes a quarter of an hour, and may end early
                _write(rows, replaces_all=False)
    _show(rows, failures)
    if arguments.write and not arguments.only:
        _write(rows, replaces_all=True)


def _measured(case: Case, rounds: int) -> dict[str, Any] | Failed:
    torch.manual_seed(0)
    tensors = case.make()
    arrays = [to_jax(x) if x.dtype not in (torch.bfloat16, torch.float16) else jtbridge.to_jax(x) for x in tensors]
    work: list[Workload] = []

    def is_measured(node: fx.Node) -> bool:
        found = workload_of(node) if node.target is case.operator else None
        if found is not None:
            work.append(found)
        return found is not None

    by_xla = jax.jit(jtbridge.wrap(case.function, backend="xla", islands="never"))
    by_torch = jax.jit(jtbridge.wrap(case.function, islands="needed"))
    try:
        with forced_islands(is_measured):
            if "_callback" not in by_torch.lower(*arrays).as_text():
                return Failed("it is not an operator of the graph, or cannot be an island")
            # Compile by a call: a program with callbacks from `lower(...).compile()` takes 60 us longer to call.
            by_torch(*arrays)
    except Exception as error:  # noqa: BLE001 - that an operator cannot be an island is a result
        return Failed.from_error(error)
    calls = {
        XLA: lambda: jax.block_until_ready(by_xla(*arrays)),
        ISLANDS: lambda: jax.block_until_ready(by_torch(*arrays)),
        TORCH: lambda: case.function(*tensors),
    }
    low = tensors[0].dtype in (torch.bfloat16, torch.float16)
    with torch.no_grad():
        cells = interleaved(calls, rounds=rounds, batch_seconds=0.002, settle=0.02, rtol=5e-2 if low else 2e-3)
    failed = next((cell for cell in cells.values() if isinstance(cell, Failed)), None)
    if failed is not None:
        return failed
    return {
        "operator": work[0].operator,
        "kind": work[0].kind,
        "dtype": work[0].dtype,
        "size": work[0].size,
        "arguments": case.title,
        **{f"{name}_us": round(1e6 * cells[key], 1) for name, key in _COLUMNS.items()},  # type: ignore[operator]
    }


_COLUMNS = {"torch": TORCH, "xla": XLA, "island": ISLANDS}


def _show(rows: list[dict[str, Any]], failures: dict[str, str]) -> None:
    table = Table("operator", "arguments", "kind", "torch us", "xla", "island")
    for row in rows:
        ratios = [f"{row[f'{name}_us'] / row['torch_us']:.2f}x" for name in ("xla", "island")]
        table.add_row(row["operator"], row["arguments"], row["kind"], f"{row['torch_us']:.0f}", *ratios)
    console = Console(width=140)
    console.print(table)
    for name, reason in failures.items():
        console.print(f"{name}: {reason}")


def _write(rows: list[dict[str, Any]], *, replaces_all: bool) -> None:
    """Store the rows. Unless `replaces_all`, keep the stored rows of cases that this run did not measure."""
    measured = {(row["operator"], row["arguments"]) for row in rows}
    before = json.loads(_FILE.read_text())["rows"] if _FILE.exists() and not replaces_all else []
    rows = [row for row in before if (row["operator"], row["arguments"]) not in measured] + rows
    lines = ",\n".join(json.dumps(row) for row in rows)
    machine = json.dumps(_report.machine() | {"cores": os.cpu_count()})
    _FILE.parent.mkdir(exist_ok=True)
    _FILE.write_text(f'{{"machine": {machine},\n"rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
