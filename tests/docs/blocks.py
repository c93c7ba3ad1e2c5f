"""Finds and runs the Python blocks of the documentation.

The blocks of a page run in order, in one namespace, in a process of their own. The title of a block may say more:

- ``needs NAME ...``: the block runs only where every name is there: a module such as ``triton``, or ``gpu``;
- ``raises NAME``: the block must raise an exception of that class;
- ``file PATH``: the block is a new file of the checkout. The page runs with a copy of the checkout, and the block is
  written to PATH in this copy; a file of ``tests/`` is run by pytest;
- ``not run``: the block is not complete by itself.

A ``text`` block directly below a Python block is its output: the printed text, or the message of the exception.
``...`` stands for any text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
MARKS = ("needs ", "raises ", "file ", "not run")

_FENCE = re.compile(
    r"^(?P<indent> *)```python(?P<header>[^\n]*)\n(?P<code>.*?)^(?P=indent)```\n"
    r"(?:\s*^(?P=indent)```text[^\n]*\n(?P<output>.*?)^(?P=indent)```$)?",
    re.DOTALL | re.MULTILINE,
)
_TITLE = re.compile(r'title="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Block:
    """One Python block of a page."""

    line: int  # the number of its first line of code
    code: str
    title: str
    output: str | None

    @property
    def needs(self) -> list[str]:
        return self.title.removeprefix("needs ").split() if self.title.startswith("needs ") else []

    @property
    def raises(self) -> str | None:
        return self.title.removeprefix("raises ") if self.title.startswith("raises ") else None

    @property
    def file(self) -> str | None:
        """The path of the file that the block is, relative to the checkout."""
        return self.title.removeprefix("file ") if self.title.startswith("file ") else None

    @property
    def missing(self) -> str | None:
        """Return why the block cannot run here; None if it can."""
        if self.title == "not run":
            return "not complete by itself"
        missing = [name for name in self.needs if not _is_there(name)]
        return f"needs {', '.join(missing)}" if missing else None


def blocks(text: str) -> list[Block]:
    """Return the Python blocks of a page."""
    found = []
    for match in _FENCE.finditer(text):
        title = _TITLE.search(match["header"])
        line = text[: match.start("code")].count("\n") + 1
        found.append(Block(line, _dedent(match["code"], match["indent"]), title[1] if title else "", _output(match)))
    return found


def run_page(path: pathlib.Path) -> Iterator[tuple[Block, str]]:
    """Run the blocks of a page; yield each with "ran", "skipped: REASON" or "failed: REASON"."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    found = blocks(path.read_text())
    with contextlib.ExitStack() as stack:
        checkout = stack.enter_context(_copied_checkout()) if any(block.file for block in found) else ROOT
        for block in found:
            if block.missing is not None:
                yield block, f"skipped: {block.missing}"
            else:
                failure = _file_failure(block, checkout) if block.file else _failure(block, path, namespace)
                yield block, "ran" if failure is None else f"failed: {failure}"


@contextlib.contextmanager
def _copied_checkout() -> Iterator[pathlib.Path]:
    """Make a copy of the package and its tests, which `import jtbridge` then finds first."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("jtbridge", "tests"):
            shutil.copytree(ROOT / name, f"{folder}/{name}", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        assert "jtbridge" not in sys.modules
        sys.path.insert(0, folder)
        yield pathlib.Path(folder)


def _file_failure(block: Block, checkout: pathlib.Path) -> str | None:
    """Write a block to its file, and run it if it is a test."""
    file = checkout / str(block.file)
    if file.exists():
        return f"`{block.file}` exists already"
    file.parent.mkdir(exist_ok=True)
    file.write_text(block.code)
    importlib.invalidate_caches()
    if file.relative_to(checkout).parts[0] != "tests":
        return None
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=checkout, check=False)
    return done.stdout[-3000:] if done.returncode else None


def _failure(block: Block, path: pathlib.Path, namespace: dict[str, object]) -> str | None:
    source = "\n" * (block.line - 1) + block.code
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(path), "exec"), namespace)
    except Exception as error:  # noqa: BLE001  (a block of code may raise anything)
        if block.raises not in {cls.__name__ for cls in type(error).__mro__}:
            return "".join(traceback.format_exc().splitlines(keepends=True)[-15:])
        got = str(error)
    else:
        if block.raises is not None:
            return f"expected {block.raises}, and nothing was raised"
        got = printed.getvalue()
    if block.output is not None and not matches(block.output, got):
        return f"expected the output\n{block.output}\nand got\n{got}"
    return None


def matches(expected: str, got: str) -> bool:
    """Return whether two texts are equal up to white space and rounding; ``...`` stands for any text."""
    parts = [re.escape(_normalized(part)) for part in expected.split("...")]
    return re.fullmatch(".*?".join(parts), _normalized(got)) is not None


def _normalized(text: str) -> str:
    """Return a text without white space, and with only four digits of every number that has a decimal point."""
    text = re.sub(r"-?\d+\.\d*(e[+-]?\d+)?", lambda number: f"{float(number[0]):.4g}", text)
    return "".join(f"{word} " for word in re.sub(r"([\[\](),])", r" \1 ", text).split())


def _is_there(name: str) -> bool:
    if name == "gpu":
        import jax

        return jax.default_backend() == "gpu"
    return importlib.util.find_spec(name) is not None


def _dedent(code: str, indent: str) -> str:
    return re.sub(f"^{indent}", "", code, flags=re.MULTILINE)


def _output(match: re.Match[str]) -> str | None:
    return None if match["output"] is None else _dedent(match["output"], match["indent"])
