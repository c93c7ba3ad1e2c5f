"""A fixed sample of the architectures, for CI."""

from __future__ import annotations

import pytest

from .__main__ import compared
from .table import SAMPLE, verdicts

pytest.importorskip("transformers")


@pytest.mark.parametrize("start", range(0, len(SAMPLE), 4))
def test_sample_matches_torch_and_is_translated(start: int):
    names = list(SAMPLE[start : start + 4])
    results = compared(names)
    assert {result["name"]: result["verdict"] for result in results} == verdicts(names), results
