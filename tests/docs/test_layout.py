"""The pages have short paragraphs, short cells and lines that fit, as the README does."""

from __future__ import annotations

import pathlib
import re

import pytest

from .blocks import DOCS, PAGES, ROOT

GENERATED = DOCS / "reference" / "operators.md"  # its paragraphs are lists of operators
WRITTEN = [*[page for page in PAGES if page != GENERATED], ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
WRITTEN += sorted((ROOT / "jtbridge").rglob("README.md"))
pages = pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
LIST = re.compile(r"\s*([-*] |\d+\. )")


def prose(page: pathlib.Path) -> str:
    """Return a page without its blocks of code and the options of its references."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^::: .*\n(?: .*\n|\n)*", "", text, flags=re.MULTILINE)


@pages
def test_no_cell_of_a_table_is_long(page: pathlib.Path):
    for line in prose(page).splitlines():
        if line.startswith("|"):
            for cell in line.strip("|").split("|"):
                assert len(cell.split()) <= 25, cell


@pages
def test_no_paragraph_is_long(page: pathlib.Path):
    for paragraph in re.split(r"\n\s*\n", prose(page)):
        is_prose = not paragraph.lstrip().startswith(("|", "!!!", "<!--")) and not LIST.match(paragraph)
        assert not is_prose or len(paragraph.strip().splitlines()) <= 5, paragraph


@pages
def test_lines_fit(page: pathlib.Path):
    for line in prose(page).splitlines():
        assert len(line) <= 120 or line.startswith(("|", "![")), line
