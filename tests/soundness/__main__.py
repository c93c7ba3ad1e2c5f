"""``python -m tests.soundness`` prints how many cases are right, refused and wrong, for each mode and backend.

``--only NAME`` runs the cases whose name contains it, ``--details`` prints what differs.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys

from . import runners
from .cases import CASES


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soundness", description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--details", action="store_true")
    parser.add_argument("--ways", help="such as eager-auto,jit-xla; all of them if left out")
    parser.add_argument("--isolated", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.isolated:
        name, mode, backend = options.isolated
        case = next(c for c in CASES if c.name == name)
        say(json.dumps(runners.outcome(case, mode, backend, isolated=True)))
        return 0
    cases = [case for case in CASES if options.only in case.name or options.only == case.section]
    ways = [way for way in runners.WAYS if not options.ways or "-".join(way) in options.ways.split(",")]
    columns = ("right", "refused", "refused without need", "crashed", "wrong")
    bad, rows = False, []
    for mode, backend in ways:
        counts: collections.Counter[str] = collections.Counter()
        for case in cases:
            kind, text = runners.outcome(case, mode, backend)
            if kind == "refused" and not case.may_refuse(mode, backend):
                kind = "refused without need"
            counts[kind] += 1
            if kind not in ("right", "refused"):
                bad = True
                if options.details:
                    say(f"{mode} {backend}: {case.section}: {case.name}: {kind}: {' '.join(text.split())[:240]}")
        rows.append(f"{mode + ' ' + backend:20}" + "".join(f"{counts[name]:22}" for name in columns))
    say(f"{f'{len(cases)} cases':20}" + "".join(f"{name:>22}" for name in columns))
    say("\n".join(rows))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
