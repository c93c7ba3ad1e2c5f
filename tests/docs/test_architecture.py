"""The table of locks in the architecture page has every lock of the package."""

from __future__ import annotations

import ast
import re

import pytest

from .blocks import DOCS, ROOT

TEXT = (DOCS / "contributing" / "architecture.md").read_text()
ROWS = [
    row for row in TEXT.split("## Locks, and their order\n")[1].split("\n## ")[0].splitlines() if row.startswith("|")
]


def _locks() -> list[tuple[str, str | None]]:
    """Return the file of each lock of the package, and the variable or attribute that it is assigned to, if any."""
    found = []
    for path in sorted((ROOT / "jtbridge").rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                target = node.targets[0]
                names[node.value] = getattr(target, "id", getattr(target, "attr", None))
        file = str(path.relative_to(ROOT))
        found += [(file, names.get(node)) for node in ast.walk(tree) if _is_lock(node)]
    return found


def _is_lock(node: ast.AST) -> bool:
    called = getattr(node, "func", None)
    return getattr(called, "attr", getattr(called, "id", "")) in ("Lock", "RLock", "Condition", "Semaphore")


LOCKS = _locks()


def test_there_are_locks():
    assert len(LOCKS) >= 12


@pytest.mark.parametrize(("file", "name"), LOCKS)
def test_locks_are_in_the_table(file: str, name: str | None):
    rows = [row for row in ROWS if f"`{file}`" in row]
    assert rows, f"no row of the table names `{file}`"
    is_constant = name is not None and re.fullmatch("_?[A-Z_]+", name)
    assert not is_constant or any(f"`{name}` in `{file}`" in row for row in rows), f"no row names `{name}` of `{file}`"


def test_every_row_names_a_lock():
    named = {file for row in ROWS for file in re.findall(r"`(jtbridge/[\w/]+\.py)`", row)}
    assert named == {file for file, _ in LOCKS}
    assert all((ROOT / file).exists() for file in named)
