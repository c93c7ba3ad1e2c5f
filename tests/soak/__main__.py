"""``python -m tests.soak --seconds 600 --threads 8``: calls of functions of all kinds from several threads.

The exit status is 0 if no call was wrong or hung, no setting of a thread was disturbed, and memory, threads and the
dropped functions stayed within bounds after the first quarter of the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import os
import sys
import time
import warnings

from . import _load
from ._functions import functions

GROWTH_ALLOWED = 0.01
KEPT_ALLOWED = 0
NEW_THREADS_ALLOWED = 0


def main() -> int:
    options = _options()
    warnings.simplefilter("ignore")
    called = functions()
    started = time.time()
    report = _load.run(
        called,
        seconds=options.seconds,
        threads=options.threads,
        seed=options.seed,
        hang_seconds=options.hang_seconds,
    )
    found = summary(report) | {"functions": len(called), "seconds": round(time.time() - started)}
    for name, value in found.items():
        say(f"{name:20} {value}")
    for problem in report.problems:
        say(f"\n{problem}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found | {"pauses": [dataclasses.asdict(pause) for pause in report.pauses]}, file)
    if report.hung:
        faulthandler.dump_traceback(all_threads=True)
        sys.stdout.flush()
        os._exit(1)  # a thread that hangs cannot be ended
    return int(bool(failures(report)))


def summary(report: _load.Report) -> dict[str, object]:
    """Return the figures of a run."""
    found: dict[str, object] = {
        "calls": report.calls.total(),
        "of each kind": dict(report.calls.most_common()),
        "must raise": f"{report.raised} ({report.raised / max(1, report.calls.total()):.1%})",
        "wrong": report.wrong,
        "hung": report.hung or 0,
        "disturbed": report.disturbed or 0,
    }
    if report.pauses:
        found |= {
            "memory, MB": f"{report.steady[0].memory / 1e6:.1f} to {report.steady[-1].memory / 1e6:.1f}",
            "growth": f"{report.growth:+.2%}",
            "threads": f"{report.steady[0].threads}, {report.new_threads} more after the warm-up",
            "functions kept": report.kept,
        }
    return found | {"failed": failures(report) or "nothing"}


def failures(report: _load.Report) -> list[str]:
    """Return descriptions of the failures of a run."""
    failed = {
        "wrong": report.wrong > 0,
        "hung": bool(report.hung),
        "disturbed": bool(report.disturbed),
        "nothing was called": not report.calls,
    }
    if report.pauses:
        failed |= {
            "memory": report.growth > GROWTH_ALLOWED,
            "threads": report.new_threads > NEW_THREADS_ALLOWED,
            "functions kept": report.kept > KEPT_ALLOWED,
        }
    return [name for name, is_so in failed.items() if is_so]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="how long functions are called (default: 600)")
    parser.add_argument("--threads", type=int, default=8, help="how many threads call them (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the arguments and of the order of calls")
    parser.add_argument("--hang-seconds", type=float, default=60, help="how long a call may take (default: 60)")
    parser.add_argument("--json", help="a file for the figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
