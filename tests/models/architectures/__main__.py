"""Compare architectures with torch: ``python -m tests.models.architectures [names] [--write PAGE] [--sample]``."""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from .page import page
from .table import ROWS, SAMPLE

_SECONDS = 600  # for one architecture


def main() -> int:
    """Compare the architectures, print each result, and return whether any is wrong or failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.models.architectures", description=__doc__)
    parser.add_argument("names", nargs="*", help="the rows to compare; all of them if none is given")
    parser.add_argument("--sample", action="store_true", help="compare the fixed sample alone")
    parser.add_argument("--write", type=pathlib.Path, help="write a page for the docs")
    parser.add_argument(
        "--results", type=pathlib.Path, help="also keep the results as JSON, one per line; go on from there"
    )
    options = parser.parse_args()
    names = options.names or (list(SAMPLE) if options.sample else list(ROWS))
    if unknown := set(names) - ROWS.keys():
        parser.error(f"there is no row {', '.join(sorted(unknown))}")
    results = compared(names, options.results)
    if options.write:
        options.write.write_text(page(results))
    right = [r for r in results if r["verdict"] in ("translated", "called")]
    whole = [r for r in results if r["verdict"] == "translated"]
    sys.stdout.write(f"{len(right)} of {len(results)} right, {len(whole)} translated\n")
    return len(right) != len(results)


def compared(names: Sequence[str], file: pathlib.Path | None = None) -> list[dict[str, Any]]:
    """Compare architectures in a child process; if it dies or hangs, a new process continues with the rest.

    Args:
        names: the rows.
        file: gets each result as it comes. Rows that it has already are not compared again.
    """
    known = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
    results = [result for result in known if result["name"] in names]
    left = [name for name in names if name not in {result["name"] for result in results}]
    with tqdm(total=len(left), unit="model") as bar:
        while left:
            for result in _child(left):
                results.append(result)
                left = left[1:]
                bar.update()
                bar.write(_shown(result))
                if file:
                    with file.open("a") as lines:
                        lines.write(json.dumps(result) + "\n")
    return results


def _child(names: Sequence[str]) -> Any:
    """Yield the results of one child process. If it died, the last result says how."""
    command = [sys.executable, "-m", "tests.models.architectures.worker", str(_SECONDS), *names]
    started = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            message = json.loads(line)
            started = message.get("started")
            if started is None:
                yield message
    if process.returncode:
        if started is None:
            raise RuntimeError(f"the child process failed with {process.returncode}")
        yield {"name": started, "verdict": "error", "reason": f"the process ended with {process.returncode}"}


def _shown(result: dict[str, Any]) -> str:
    figures = " ".join(f"{result[key]:.1e}" for key in ("forward", "gradient") if result.get(key) is not None)
    return (
        f"{result['name']:<30} {result['verdict']:<11} {figures} {result.get('seconds', 0):5.1f} s  {result['reason']}"
    )


if __name__ == "__main__":
    sys.exit(main())
