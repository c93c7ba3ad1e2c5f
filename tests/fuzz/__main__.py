"""``python -m tests.fuzz --programs 5000 --seed 0``.

Each program is generated from its number alone. It runs on one backend and in one dtype, which its number chooses too:
a finding is reproduced by ``--seed NUMBER --programs 1``. With ``--all`` it runs on all backends in all dtypes, which
costs about 15 s instead of 3. The programs run in a child process that is replaced after some of them and whenever one
ends it.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_PER_PROCESS = 40


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    options = _options()
    if options.worker:
        return _work(options)
    counts: collections.Counter[str] = collections.Counter()
    findings: list[dict[str, Any]] = []
    started, seed, end = time.time(), options.seed, options.seed + options.programs
    log = open(options.log, "a") if options.log else None  # noqa: SIM115 - open as long as the process
    while seed < end:
        finished = seed
        for record in _records(options, seed, min(seed + _PER_PROCESS, end)):
            finished = max(finished, record["seed"] + record["done"])
            counts.update(record["counts"])
            findings += record["findings"]
            for finding in record["findings"]:
                say(f"\n# program {record['seed']}\n# {finding['text']}\n{finding['source']}")
            if log:
                log.write(json.dumps(record) + "\n")
                log.flush()
        if finished == seed:
            counts["died"] += 1
            findings.append({"kind": "died", "text": f"the process ended in program {seed}", "source": ""})
            say(f"\n# program {seed} ended the process\n{_last_words(options)}")
            finished += 1
        seed = finished
    say(f"\n{options.programs} programs in {time.time() - started:.0f} s")
    for name, count in sorted(counts.items()):
        say(f"{count:8}  {name}")
    return 1 if any(f["kind"] in ("different", "crashed", "refused", "died") for f in findings) else 0


def _records(options: argparse.Namespace, seed: int, end: int) -> Any:
    command = [sys.executable, "-m", "tests.fuzz", "--worker", "--seed", str(seed), "--programs", str(end - seed)]
    command += ["--backends", options.backends, "--dtypes", options.dtypes]
    command += ["--islands", str(options.islands)]
    command += ["--eager"] * options.eager + ["--no-shrink"] * options.no_shrink + ["--all"] * options.all
    with (
        open(options.errors, "w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith('{"seed"'):
                yield json.loads(line)
        code = child.wait()
    if code:
        say(f"# the process of programs {seed} to {end - 1} ended with {code}")


def _last_words(options: argparse.Namespace) -> str:
    """The end of the output of the child process: the stack of a crash, by faulthandler."""
    return "".join(f"# {line}\n" for line in options.errors.read_text(errors="replace").splitlines()[-40:])


def _work(options: argparse.Namespace) -> int:
    import torch

    from . import check

    faulthandler.enable()
    torch.set_num_threads(1)
    backends, dtypes = options.backends.split(","), options.dtypes.split(",")
    for seed in range(options.seed, options.seed + options.programs):
        counts: collections.Counter[str] = collections.Counter()
        findings = []
        program = check.comparable(seed)
        ways = list(itertools.product(dtypes, backends))
        ways = ways if options.all else [ways[seed % len(ways)]]
        for dtype in map(functools.partial(getattr, torch), dict.fromkeys(dtype for dtype, _ in ways)):
            names = [backend for name, backend in ways if getattr(torch, name) is dtype]
            expected = check.expected(program, dtype)
            counts[f"{str(dtype).removeprefix('torch.')}: compared"] += 1
            for backend in names:
                # Where "auto" translates, it is "xla": the same program would be compiled again.
                if backend == "xla" and "auto" in names and not options.eager:
                    reason = check.called_because(program, dtype)
                    if reason is None:
                        counts["xla: the same as auto"] += 1
                        continue
                    counts[f"called: {reason.split(':')[-1].strip()[:100]}"] += 1
                counts[f"{backend}: compared"] += 1
                for finding in check.check(program, dtype, backend, options.eager, expected, islands=options.islands):
                    if finding.kind == "refused" and backend == "xla":
                        continue  # "auto" calls it, for the reason counted above
                    counts[f"{backend}: {finding.kind}"] += 1
                    if finding.kind != "torch" and not any(f["same"] == list(finding.signature) for f in findings):
                        findings.append(_shrunk(finding, program, dtype, backend, options))
        say(json.dumps({"seed": seed, "done": 1, "counts": counts, "findings": findings}))
    return 0


def _shrunk(finding: Any, program: Any, dtype: Any, backend: str, options: argparse.Namespace) -> dict[str, Any]:
    from . import shrink

    if not options.no_shrink:
        program = shrink.shrink(program, _fails_like(finding, dtype, backend, options))
    return {
        "kind": finding.kind,
        "same": list(finding.signature),
        "text": str(finding),
        "source": program.source,
        "arguments": [str(a) for a in program.arguments],
    }


def _fails_like(finding: Any, dtype: Any, backend: str, options: argparse.Namespace) -> Any:
    from . import check
    from .programs import Invalid

    def fails(program: Any) -> bool:
        try:
            found = check.check(program, dtype, backend, options.eager, modes=(finding.mode,), islands=options.islands)
        except (Invalid, Exception):  # noqa: BLE001 - torch does not run it
            return False
        return any(f.signature == finding.signature for f in found)

    return fails


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first program")
    parser.add_argument("--backends", default="auto,dlpack,callback", help="'xla' refuses more than 'auto'")
    parser.add_argument("--dtypes", default="float64,float32")
    parser.add_argument("--all", action="store_true", help="each program on all backends and in all dtypes")
    parser.add_argument("--eager", action="store_true", help="without jax.jit")
    parser.add_argument(
        "--islands", type=float, default=0.0, help="the share of operators that torch runs in translated programs"
    )
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--log", type=Path, help="append one line of JSON for each program")
    parser.add_argument("--errors", type=Path, help="the file for the output of the last child process")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.errors = options.errors or Path(tempfile.gettempdir(), f"jtbridge-fuzz-{os.getpid()}.txt")
    return options


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.exit(main())
