"""Make a failing program as small as possible."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

from .programs import Program, Statement


def shrink(program: Program, fails: Callable[[Program], bool], most: int = 60) -> Program:
    """Return the smallest program found in a number of tries that still fails in the same way."""
    tries = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _simpler(program):
            if tries >= most:
                return program
            tries += 1
            if fails(candidate):
                program, smaller = candidate, True
                break
    return program


def _simpler(program: Program) -> Iterator[Program]:
    if len(program.results) > 1:
        for i in range(len(program.results)):
            yield dataclasses.replace(program, results=(program.results[i],))
        for i in range(len(program.results)):
            yield dataclasses.replace(program, results=program.results[:i] + program.results[i + 1 :])
    statements = program.statements
    for size in (10, 5, 2):
        for start in range(0, len(statements) - size + 1, size):
            yield dataclasses.replace(program, statements=statements[:start] + statements[start + size :])
    for i in reversed(range(len(statements))):
        yield dataclasses.replace(program, statements=statements[:i] + statements[i + 1 :])
        # Where the value of the removed statement is needed, try one of its operands instead.
        for defined in statements[i].defines:
            for operand in dict.fromkeys(re.findall(r"\b(?:t\d+|[abc])\b", str(statements[i]))):
                if operand not in statements[i].defines:
                    rest = tuple(_renamed(s, defined, operand) for s in statements[i + 1 :])
                    results = tuple(operand if name == defined else name for name in program.results)
                    yield dataclasses.replace(program, statements=statements[:i] + rest, results=results)


def _renamed(statement: Statement, old: str, new: str) -> Statement:
    def renamed(text: str) -> str:
        return re.sub(rf"\b{old}\b", new, text)

    return Statement(
        tuple(map(renamed, statement.lines)),
        tuple(map(renamed, statement.defines)),
        tuple(map(renamed, statement.guards)),
    )
