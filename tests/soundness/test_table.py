"""Every case of the table, eagerly and under a fresh `jax.jit` for each backend: right, or refused where it may be."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import torch

from . import runners
from .cases import CASES, Case


@pytest.mark.parametrize(("mode", "backend"), runners.WAYS, ids="-".join)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_is_right_or_refused(case: Case, mode: str, backend: str):
    kind, text = runners.outcome(case, mode, backend)
    allowed = {"right", "refused"} if case.may_refuse(mode, backend) else {"right"}
    assert kind in allowed, text


def test_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES) >= 100


def test_a_wrong_result_is_found():
    """The comparison tells a wrong value, sign, dtype, shape and order."""

    def outcome(result):
        def script(run):
            yield torch.tensor([1.0, -0.0]) if run.is_torch else result

        return runners.outcome(Case("a result", "tests", script), "eager", "auto")[0]

    right = jnp.array([1.0, -0.0])
    assert outcome(right) == "right"
    for wrong in (right * 2, -right, right.astype("float16"), right[:1], [right, right], right * jnp.nan, right + 0.0):
        assert outcome(wrong) == "wrong"
