"""Every Python block of the documentation runs, and prints the output that the page shows."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from .blocks import DOCS, MARKS, PAGES, ROOT, blocks, matches

WITH_BLOCKS = [page for page in PAGES if blocks(page.read_text())]


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: str(page.relative_to(DOCS)))
def test_blocks_run(page: pathlib.Path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs", str(page)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": ""},  # as a reader starts it, with one device
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") >= len(blocks(page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_code_fence_is_found(page: pathlib.Path):
    text = page.read_text()
    assert text.count("```python") == len(blocks(text))
    for block in blocks(text):
        assert not block.title or block.title.startswith(MARKS), f"line {block.line}: unknown mark `{block.title}`"


def test_outputs_are_compared():
    assert matches("a ... c", "a b\nc\n")
    assert matches("Array([1., 2.])", "Array([1.0000001, 2.])\n")
    assert not matches("[1. 2.]", "[1.001 2.]")
    assert not matches("a b", "a b c")
    assert not matches("a ... d", "a b c")
