"""`python -m benchmarks [--quick] [--only NAME ...] [--clock cpu] [--list]`."""

import argparse
import compileall
from pathlib import Path

from tqdm import tqdm

import jtbridge
from benchmarks import (
    _report,
    eager,
    generation,
    islands,
    leaks,
    memory,
    models,
    reverse,
    small,
    startup,
    steady,
    vision,
    vmap,
)
from benchmarks._results import Benchmark, Options

ROWS: dict[str, Benchmark] = (
    eager.ROWS
    | small.ROWS
    | steady.ROWS
    | models.ROWS
    | vision.ROWS
    | islands.ROWS
    | generation.ROWS
    | vmap.ROWS
    | memory.ROWS
    | startup.ROWS
    | leaks.ROWS
    | reverse.ROWS
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats: rougher numbers")
    parser.add_argument("--only", action="append", metavar="NAME", help="rows whose name contains this")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a busy machine")
    parser.add_argument("--list", action="store_true", help="the names of the rows")
    arguments = parser.parse_args()
    if arguments.list:
        print(*ROWS, sep="\n")
        return
    chosen = {key: row for key, row in ROWS.items() if any(part in key for part in arguments.only or [""])}
    if not chosen:
        parser.error(f"no row is called like that; there are {', '.join(ROWS)}")

    # Compile to bytecode, as pip does for the packages that it installs: otherwise each measured process may do it.
    compileall.compile_dir(Path(jtbridge.__file__).parent, quiet=1)
    facts = _report.machine() | {"clock": arguments.clock}
    rows = []
    for key, benchmark in (bar := tqdm(chosen.items(), unit="row")):
        bar.set_description(key)
        rows.append(benchmark(Options(quick=arguments.quick, clock=arguments.clock)))
        path = _report.write(rows, facts)  # after each row, so that a run that is stopped is not lost
    _report.show(rows, facts)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
