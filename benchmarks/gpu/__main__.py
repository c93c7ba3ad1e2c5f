"""`python -m benchmarks.gpu [--only NAME ...] [--list] [--dry-run] [--seconds N]`."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

# Otherwise JAX would reserve three quarters of the GPU's memory at its first use, and torch needs memory too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import torch

from benchmarks import _report
from benchmarks._results import Failed
from benchmarks.gpu import _table, attention, bandwidth, block, call, loss
from benchmarks.gpu._rows import Options, Row

# "call" comes last, because one of its contestants may first compile C++.
FAMILIES = {
    "attention": attention.ROWS,
    "bandwidth": bandwidth.ROWS,
    "loss": loss.ROWS,
    "block": block.ROWS,
    "call": call.ROWS,
}
NEEDS_GPU = "this needs a GPU that JAX and torch can use; `--dry-run` runs it on tiny arrays without one"


def missing_gpu() -> str | None:
    """Return why nothing can be measured here, or None if JAX and torch have a GPU."""
    if jax.default_backend() not in ("gpu", "cuda", "rocm"):
        return f"JAX runs on {jax.default_backend()}: {NEEDS_GPU}"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} has no GPU: {NEEDS_GPU}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="rows whose name contains this")
    parser.add_argument("--list", action="store_true", help="the names of the rows")
    parser.add_argument("--dry-run", action="store_true", help="tiny arrays, on a CPU too; the numbers mean nothing")
    parser.add_argument("--seconds", type=float, default=400, help="start no row after this many seconds (400)")
    given = parser.parse_args(arguments)
    if given.list:
        print(*(key for rows in FAMILIES.values() for key in rows), sep="\n")
        return
    chosen = {
        family: {key: row for key, row in rows.items() if any(part in key for part in given.only or [""])}
        for family, rows in FAMILIES.items()
    }
    if not any(chosen.values()):
        parser.error("no row is called like that; `--list` lists them")
    reason = None if given.dry_run else missing_gpu()
    if reason:
        parser.exit(1, f"{reason}\n")

    facts = machine() | {"dry run": given.dry_run}
    options = Options(dry=True, rounds=1, turn_seconds=0) if given.dry_run else Options()
    done, end = [], time.monotonic() + given.seconds
    for family, rows in chosen.items():
        found = [measured(key, row, options, end) for key, row in rows.items()]
        if found:
            _table.show(f"{family} (a dry run: the numbers mean nothing)" if given.dry_run else family, found)
        done += found
    print(", ".join(f"{name} {fact}" for name, fact in facts.items()))
    print(f"written to {_table.write(done, facts)}")


def measured(key: str, row: Any, options: Options, end: float) -> Row:
    """Measure a row; if that fails or the time is up, return a row with the reason."""
    if time.monotonic() > end:
        return Row(key, key, "", {"not run": Failed("the time was up; --only and --seconds choose")})
    try:
        return row(options)
    except Exception as error:  # noqa: BLE001 - the others go on
        return Row(key, key, "", {"failed": Failed.from_error(error)})


def machine() -> dict[str, Any]:
    """Return the machine and the versions that the numbers depend on."""
    return {"device": jax.devices()[0].device_kind, **_report.machine(_report.PACKAGES + _PACKAGES)}


_PACKAGES = ("triton", "jax-triton", "liger-kernel", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


if __name__ == "__main__":
    main()
