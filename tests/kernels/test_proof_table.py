"""The table of the proof: with Triton's interpreter instead of a GPU, every kernel is right in every case."""

from __future__ import annotations

import pytest

from jtbridge.kernels import _proving

from .harness import interpreting, needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(not interpreting(), reason="`make test-gpu` proves the kernels on a GPU"),
]
CASES = [(folder, number) for folder in _proving.folders() for number in range(len(_proving.cases(folder)))]


@pytest.mark.parametrize(("folder", "number"), CASES)
def test_a_case_proves_its_kernels(folder, number):
    found: list[tuple[str, str | None]] = []
    _proving.run_case(_proving.cases(folder)[number], lambda kernel: None, lambda *each: found.append(each))
    assert {kernel.partition(" ")[0] for kernel, _ in found} == {folder}
    assert [wrong for _, wrong in found if wrong] == []
