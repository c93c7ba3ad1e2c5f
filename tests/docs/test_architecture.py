"""The tables of the architecture page have every lock and every mode of the package."""

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


def _modes() -> set[tuple[str, str]]:
    """Return the name and the file of each class of the package that is a dispatch mode or a function mode of torch."""
    classes = [
        (node.name, {ast.unparse(base).rpartition(".")[2] for base in node.bases}, str(path.relative_to(ROOT)))
        for path in sorted((ROOT / "jtbridge").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    modes = {"TorchDispatchMode", "TorchFunctionMode"}
    for _ in range(5):  # also subclasses of subclasses
        modes |= {name for name, bases, _ in classes if bases & modes}
    return {(name, file) for name, bases, file in classes if bases & modes}


def _section(title: str) -> str:
    return TEXT.split(f"## {title}\n")[1].split("\n## ")[0]


MODES = _modes()
SECTIONS = [_section("Order of the dispatch modes"), _section("Modes outside capture")]


def _named_modes(section: str) -> set[tuple[str, str]]:
    """Return the modes that a section names, one or two at a time, before their file."""
    modes = r"`(\w+)`(?:, `(\w+)`)? (?:in |\()`(jtbridge/[\w/]+\.py)`"
    return {
        (name, match[3])
        for match in re.finditer(modes, " ".join(section.split()))
        for name in match.groups()[:2]
        if name is not None
    }


def test_every_mode_is_named_once_with_its_file():
    assert len(MODES) > 40
    inside, outside = map(_named_modes, SECTIONS)
    assert inside | outside == MODES
    assert not inside & outside


def test_rows_of_modes_outside_capture_say_the_kind():
    """The kind is the third column of the table, and what the class is derived from."""
    rows = [re.split(r" \| ", row.strip("| ")) for row in SECTIONS[1].splitlines() if row.startswith("| `")]
    assert rows
    for mode, kind, *_ in rows:
        name, file = re.findall(r"`([^`]+)`", mode)
        source = (ROOT / file).read_text()
        bases = re.search(rf"class {name}\((\w+)\)", source)
        assert bases is not None
        assert kind == ("function" if bases[1] == "TorchFunctionMode" else "dispatch"), name
