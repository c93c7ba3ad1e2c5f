"""The program of a child process of the proof: it finds facts about the chip, or runs some cases of one folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

import jax
import jax.numpy as jnp

from jtbridge.kernels import _chip, _proofs, _proving
from jtbridge.kernels._launch import interpreting
from jtbridge.triton import unsupported_reason

from ._child import write_line


def main(plan: Mapping[str, Any]) -> None:
    """Run the cases that a plan names, as "folder:number"; or "facts" for the facts."""
    known: dict[str, list[_proving.Case]] = {}
    with open(plan["results"], "a") as file:
        for key in plan["checks"]:
            write_line(file, {"start": key})
            if key == "facts":
                write_line(file, {"done": key, **_facts()})
                continue
            folder, _, number = key.partition(":")
            if folder not in known:
                known[folder] = _proving.cases(folder)
            found = _prove_case(file, known[folder][int(number)])
            write_line(file, {"done": key, "kernels": found})
            if any(wrong for _, wrong in found) and not _works():
                return  # an error of the GPU lasts as long as the process; the next cases need a new one


def _facts() -> dict[str, Any]:
    refused = _unprovable_reason()
    cases = {} if refused else {name: [case.name for case in _proving.cases(name)] for name in _proving.folders()}
    return {"refused": refused, "key": _proofs.key(), "cases": cases}


def _unprovable_reason() -> str | None:
    chip = _chip.present()
    if chip is None:
        return f'JAX has no GPU: its default backend is "{jax.default_backend()}"'
    if interpreting():
        return None  # a test, with a stand-in for the chip
    return unsupported_reason("rocm" if chip.capability is None else "cuda")


def _prove_case(file: TextIO, case: _proving.Case) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []

    def add(kernel: str, wrong: str | None) -> None:
        found.append((kernel, wrong))
        write_line(file, {"found": (kernel, wrong)})

    _proving.run_case(case, lambda kernel: write_line(file, {"note": kernel}), add)
    return found


def _works() -> bool:
    """Return whether the GPU still computes in this process."""
    try:
        return float(jax.block_until_ready(jnp.ones(2) + 1)[0]) == 2.0
    except Exception:  # noqa: BLE001  (whatever it says, this process is of no more use)
        return False
