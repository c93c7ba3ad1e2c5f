"""Every Python block of the README runs unchanged."""

from __future__ import annotations

import pathlib
import re

import jax
import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"
PROSE = re.sub(r"^```.*?^```$", "", README.read_text(), flags=re.DOTALL | re.MULTILINE)
BLOCKS = {
    f"line_{README.read_text()[: match.start()].count(chr(10)) + 1}": match.group(1)
    for match in re.finditer(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
}


def test_there_are_blocks():
    assert len(BLOCKS) >= 3
    assert len(BLOCKS) == README.read_text().count("```python")


@pytest.mark.parametrize("name", BLOCKS)
def test_block_runs(name: str):
    with jax.numpy_dtype_promotion("standard"):  # the default of JAX
        exec(compile(BLOCKS[name], f"README.md:{name}", "exec"), {"__name__": "__main__"})
        jax.effects_barrier()


def test_no_cell_of_a_table_is_long():
    for line in PROSE.splitlines():
        if line.startswith("|"):
            for cell in line.strip("|").split("|"):
                assert len(cell.split()) <= 25, cell


def test_no_paragraph_is_long():
    for paragraph in re.split(r"\n\s*\n", PROSE):
        if not paragraph.lstrip().startswith("|"):
            assert len(paragraph.strip().splitlines()) <= 5, paragraph


def test_lines_fit():
    assert all(len(line) <= 120 for line in PROSE.splitlines() if not line.startswith("|"))


def test_links_have_existing_targets():
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", PROSE):
        assert target.startswith("https://") or (README.parent / target).exists(), target


def test_limits_precede_the_features():
    """The limits, and the sentence that GPUs are experimental, come before the features."""
    assert PROSE.index("## Status and limits") < PROSE.index("## A model")
    sentence = "GPUs are experimental"
    assert PROSE.index("GPU") == PROSE.index(sentence) + sentence.index("GPU")
