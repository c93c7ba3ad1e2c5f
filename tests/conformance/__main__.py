"""The command line: ``python -m tests.conformance --help``."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Sequence

from . import known as known_failures
from .modes import MODES
from .report import FOLDER, Progress, judge, print_unexpected, say, table, write_files
from .runner import CASE_SECONDS, Runner
from .samples import SAMPLES_PER_OPERATOR, operators
from .worker import Settings


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument(
        "--backend",
        action="append",
        help="dlpack (default), callback, xla, triton, auto, wrap-torch2jax, torchax or module:class; may be repeated",
    )
    parser.add_argument("--ops", default="", metavar="REGEX", help="only operators whose name it is found in")
    parser.add_argument(
        "--modes", default=",".join(MODES), metavar="A,B", help=f"some of {','.join(MODES)} (default all)"
    )
    parser.add_argument("--dtype", help="float64, bfloat16, complex64, ... (default: each operator's first choice)")
    parser.add_argument(
        "--samples", type=int, default=SAMPLES_PER_OPERATOR, metavar="N", help="per operator (default %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="worker processes (default %(default)s)")
    parser.add_argument("--timeout", type=float, default=CASE_SECONDS, metavar="S", help="seconds for one case")
    parser.add_argument("--update", action="store_true", help="rewrite the list of known failures")
    arguments = parser.parse_args(argv)
    arguments.modes = tuple(mode for mode in MODES if mode in arguments.modes.split(","))
    if not arguments.modes:
        parser.error(f"--modes: choose from {', '.join(MODES)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen cases; return 0 if exactly the listed cases failed."""
    arguments = _arguments(argv)
    # Each worker keeps one core busy; they inherit this.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = [name for name in operators() if re.search(arguments.ops, name)]
    if not names:
        say(f"No operator's name matches {arguments.ops!r}.")
        return 2
    dtype = arguments.dtype or ""
    known = known_failures.load(dtype=dtype)
    settings = Settings(
        backends=tuple(arguments.backend or ["dlpack"]),
        modes=arguments.modes,
        dtype=arguments.dtype,
        samples=arguments.samples,
        log=FOLDER / "workers.log",
    )
    say(f"{len(names)} operators, modes {', '.join(settings.modes)}, backends {', '.join(settings.backends)}")
    started = time.monotonic()
    progress = Progress(len(names), known)
    Runner(settings, arguments.jobs, progress.add, arguments.timeout).run(names)

    results = progress.results
    verdict = judge(results.values(), known)
    write_files(results, known)
    print_unexpected(verdict)
    for line in table(results, settings.modes):
        say(line)
    say(f"{time.monotonic() - started:.0f} s; details under {FOLDER}/")
    if arguments.update:
        failed = {r.case: r.outcome.detail for r in results.values() if r.outcome.status == "failed"}
        known_failures.update(failed, list(results), dtype)
        say(f"Wrote {known_failures.PATH.name}: {len(failed)} failures of this run.")
    if verdict.listed:
        say(f"{len(verdict.listed)} known failures")
    say(f"{verdict.passed} passed, {len(verdict.unexpected)} failed")
    return 1 if verdict.unexpected and not arguments.update else 0


if __name__ == "__main__":
    raise SystemExit(main())
