"""One table of cases that a bridge between torch and JAX easily gets wrong, each a script of a few lines.

A script is run twice: with torch, which gives the expected results, and with jtbridge. `run.wrap(f)` is `f` itself for
torch, `run(f, x)` calls it, `run.grad`, `run.jacfwd` and `run.vmap` transform it. What a script yields is compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

V = torch.arange(1.0, 5.0)
ROWS = torch.stack([V, V.flip(0) * 0.5])


@dataclasses.dataclass(frozen=True)
class Case:
    """A script, and where it may be refused by an error of jtbridge instead of being right."""

    name: str
    section: str
    script: Callable[[Any], Iterator[Any]]
    refused: tuple[
        str, ...
    ] = ()  # any of "eager", "jit", "xla" (only backend "xla" refuses it under jit, because it cannot be translated)
    isolated: bool = False  # a mistake would end the process

    def may_refuse(self, mode: str, backend: str) -> bool:
        return mode in self.refused or (mode == "jit" and backend in self.refused)


CASES: list[Case] = []


def case(section: str, *refused: str, isolated: bool = False) -> Callable[[Any], Any]:
    """Add a case, named after its function."""

    def add(script: Any) -> Any:
        CASES.append(Case(script.__name__.replace("_", " ").strip(), section, script, refused, isolated))
        return script

    return add
