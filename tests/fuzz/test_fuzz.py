"""A hundred random programs, each in one mode, dtype and backend. `make fuzz` runs thousands in all combinations."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from tests.compare import as_numpy

from . import check
from .programs import Argument, Invalid, Program, Statement
from .shrink import shrink

_PROGRAMS = 100
_BACKENDS = ("auto", "dlpack", "callback")
_COMBINATIONS = list(itertools.product(check.MODES, (torch.float64, torch.float32), _BACKENDS))


@pytest.mark.parametrize("number", range(_PROGRAMS))
def test_random_program_matches_torch(number: int):
    program = check.comparable(number, most=8)
    mode, dtype, backend = _COMBINATIONS[number % len(_COMBINATIONS)]
    findings = check.check(program, dtype, backend, modes=(mode,))
    assert not [f for f in findings if f.kind != "torch"], program.source


def _program(*statements: str, result: str) -> Program:
    arguments = (Argument("a", "float", (3,), True),)
    return Program(0, arguments, tuple(Statement((line,), (line[:2],)) for line in statements), (result,))


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch):
    program = _program("t0 = a.sin()", "t1 = t0 * 2", result="t1")
    assert check.check(program, torch.float64, "auto") == []
    right = check.expected(program, torch.float64)
    for mode in check.MODES:
        wrong = dataclasses.replace(right, results=dict(right.results))
        wrong.results[mode] = [y * (1 + 1e-5) for y in right.results[mode]]
        found = check.check(program, torch.float64, "auto", want=wrong)
        assert [(f.kind, f.mode) for f in found] == [("different", mode)]


def test_programs_avoid_points_without_a_derivative():
    kink = Statement(("t0 = torch.relu(a)",), ("t0",), ("away(a, 0)",))
    near = Program(0, (Argument("a", "float", (3,), True),), (kink,), ("t0",))
    assert all(bool((x.abs() > 0.01).all()) for (x,) in near.inputs(torch.float64))
    check.expected(near, torch.float64)
    shifted = Statement(("t0 = torch.relu(a - a)",), ("t0",), ("away(a - a, 0)",))
    with pytest.raises(Invalid, match="away"):
        check.expected(Program(0, near.arguments, (shifted,), ("t0",)), torch.float64)


def test_failing_program_is_minimized():
    program = _program("t0 = a.sin()", "t1 = t0 * 2", "t2 = t1 + a", "t3 = t2.exp()", result="t3")

    def fails(candidate: Program) -> bool:
        try:
            candidate.function()(torch.ones(3))
        except NameError:
            return False
        return "exp" in candidate.source

    small = shrink(program, fails)
    assert [str(s) for s in small.statements] == ["t3 = a.exp()"]


def test_program_is_determined_by_its_number():
    a, b = check.comparable(3), check.comparable(3)
    assert a == b
    for row, again in zip(a.inputs(torch.float32), b.inputs(torch.float32), strict=True):
        for x, y in zip(row, again, strict=True):
            assert (as_numpy(x) == as_numpy(y)).all()
