"""Every Python block of the README runs as it stands."""

from __future__ import annotations

import pathlib
import re

import jax
import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"
BLOCKS = {
    f"line_{README.read_text()[: match.start()].count(chr(10)) + 1}": match.group(1)
    for match in re.finditer(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
}


def test_there_are_blocks():
    assert len(BLOCKS) >= 3
    assert len(BLOCKS) == README.read_text().count("```python")


@pytest.mark.parametrize("name", BLOCKS)
def test_block_runs(name: str):
    with jax.numpy_dtype_promotion("standard"):  # what a reader has
        exec(compile(BLOCKS[name], f"README.md:{name}", "exec"), {"__name__": "__main__"})
        jax.effects_barrier()
