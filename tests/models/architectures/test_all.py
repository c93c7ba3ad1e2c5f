"""All architectures. This takes long, so CI runs `test_sample.py` instead."""

from __future__ import annotations

import pytest

from .__main__ import compared
from .table import KINDS, verdicts

pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", KINDS)
def test_all_models_of_a_kind_match_torch(kind: str):
    names = list(KINDS[kind])
    results = compared(names)
    assert {result["name"]: result["verdict"] for result in results} == verdicts(names), results
