"""Random programs, translated so that torch runs half or all of the operators inside the translated program."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge
from tests.fuzz import check

_CALL = "xla_buffer_python_cpu_callback"


@pytest.mark.parametrize("number", range(24))
def test_random_program_with_forced_islands_matches_torch(number: int):
    program = check.comparable(1000 + number, most=8)
    mode = check.MODES[number % 4]
    dtype = (torch.float32, torch.float64)[number // 4 % 2]
    share = (0.5, 1.0)[number // 8 % 2]
    findings = check.check(program, dtype, "auto", modes=(mode,), islands=share)
    assert not [f for f in findings if f.kind != "torch"], program.source


def test_forced_share_of_operators_is_called():
    def fn(x):
        for _ in range(10):
            x = x.sin() * 2
        return x

    counts = {}
    for share in (0.0, 0.5, 1.0):
        with check.forced(0, share) if share else contextlib.nullcontext():
            counts[share] = jax.jit(jtbridge.wrap(fn)).lower(jnp.ones(3)).as_text().count(f"@{_CALL}")
    assert counts[0.0] == 0
    assert 2 < counts[0.5] < 18
    assert counts[1.0] == 20
