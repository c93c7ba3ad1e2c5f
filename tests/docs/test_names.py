"""The documentation and the code name the same things."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

import jtbridge
from jtbridge import errors, kernels

from .blocks import DOCS, PAGES, ROOT

TEXTS = {page: page.read_text() for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]}
GUIDE = "\n".join(text for page, text in TEXTS.items() if DOCS / "reference" not in page.parents)
REFERENCE = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
CLASSES = [value for value in vars(errors).values() if isinstance(value, type)]
KERNELS = [name for name, value in vars(kernels).items() if inspect.isfunction(value) and not name.startswith("_")]
pages = pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.mark.parametrize("name", sorted(jtbridge.__all__))
def test_public_names_are_in_the_reference_and_in_the_guide(name: str):
    assert re.search(rf"^(?:::: |      heading: )jtbridge\.{name}$", REFERENCE, re.MULTILINE)
    is_report = inspect.isclass(getattr(jtbridge, name))  # the class of a result: its only page is the reference
    assert is_report or re.search(rf"\bjtbridge\.{name}\b|`{name}\b", GUIDE), name


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_kernels_are_in_the_reference_and_in_the_guide(name: str):
    assert f"heading: jtbridge.kernels.{name}\n" in REFERENCE
    assert f"`{name}`" in GUIDE


@pytest.mark.parametrize("function", [jtbridge.wrap, jtbridge.config], ids=["wrap", "config"])
def test_options_are_in_the_guide(function):
    for name in list(inspect.signature(function).parameters):
        assert name == "fn" or re.search(rf"\b{name}=", GUIDE), f"no page has `{name}=`"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_has_a_cause_and_a_fix(cls: type):
    text = TEXTS[DOCS / "errors.md"]
    match = re.search(rf"^### {cls.__name__}\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE)
    assert match, "no section"
    for part in ("Cause", "Fix"):
        sentence = re.search(rf"^\*\*{part}\.\*\* (.+?)(?:\n\n|\Z)", match[1], re.DOTALL | re.MULTILINE)
        assert sentence, part
        assert len(sentence[1].split()) >= 4, part


@pytest.mark.parametrize("heading", re.findall(r'^## "(.+)"$', TEXTS[DOCS / "faq.md"], re.MULTILINE))
def test_messages_that_the_faq_quotes_exist(heading: str):
    """The longest part of a heading without names and numbers occurs in a message of jtbridge or of torch."""
    part = max(re.split(r"\.\.\.|`[^`]*`|\"[^\"]*\"|\b\d+\b|[()]", heading), key=len).strip(" :,")
    assert len(part) > 8, part
    assert any(part in text for text in _MESSAGES), part


def _literals() -> set[str]:
    """Return the texts in the code of jtbridge. A value in an f-string becomes a zero character."""
    found = set()
    for path in (ROOT / "jtbridge").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(str(x.value) if isinstance(x, ast.Constant) else "\0" for x in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


_MESSAGES = _literals()


@pages
def test_names_of_jtbridge_exist(page: pathlib.Path):
    if page.name == "operators.md":  # `jtbridge.name` is an operator of `torch.ops` there
        return
    text = re.sub("^::: .*$", "", TEXTS[page], flags=re.MULTILINE)  # these name files, and `make docs` finds them
    for name in set(re.findall(r"(?<![\w/:.])jtbridge(?:\.[A-Za-z_]\w*)+", text)):
        assert _resolves(name) or _is_new(TEXTS[page], name.replace(".", "/")), name


@pages
def test_errors_that_are_named_exist(page: pathlib.Path):
    found = set(re.findall(r"`(?:jtbridge\.errors\.|errors\.|jax\.errors\.)?([A-Z]\w+(?:Error|Warning))`", TEXTS[page]))
    known = {*vars(errors), *vars(builtins), *vars(jax.errors)}
    assert found <= known, found - known


@pages
def test_files_that_are_named_exist(page: pathlib.Path):
    prefixes = "jtbridge|tests|benchmarks|examples|docs|tools"
    for name in set(re.findall(rf"`((?:{prefixes})/[\w./-]*)`", TEXTS[page])):
        assert (ROOT / name).exists() or _is_new(TEXTS[page], name), name


def _is_new(text: str, name: str) -> bool:
    """Return whether a page tells its reader to make a file or folder."""
    return f'title="file {name}' in text


@pages
def test_names_in_files_exist(page: pathlib.Path):
    """As "`Name` in `jtbridge/folder/_file.py`"."""
    for name, file in re.findall(r"`(\w+)` in `(jtbridge/[\w/]+\.py)`", TEXTS[page]):
        assert re.search(rf"\b{name}\b", (ROOT / file).read_text()), f"{name} in {file}"


@pages
def test_targets_of_make_exist(page: pathlib.Path):
    makefile = (ROOT / "Makefile").read_text()
    for name in set(re.findall(r"\bmake ([a-z][\w-]*)(?=[`\s\"]|$)", "\n".join(_code(TEXTS[page])))):
        assert re.search(rf"^{re.escape(name)}:", makefile, re.MULTILINE), name


def test_make_help_names_every_target():
    makefile = (ROOT / "Makefile").read_text()
    (names,) = re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    targets = names.replace("\\", " ").split()
    shown = makefile.split("\n\n")[0]
    for name in targets:
        assert name == "help" or re.search(rf"\bmake {name}\b(?!-)", shown), name


@pages
def test_options_that_are_named_exist(page: pathlib.Path):
    for function in ("wrap", "config"):
        known = set(inspect.signature(getattr(jtbridge, function)).parameters)
        for arguments in re.findall(rf"`(?:jtbridge\.)?{function}\(([^`]*)\)`", TEXTS[page]):
            assert set(re.findall(r"(\w+)=", re.sub(r"\(.*\)", "", arguments))) <= known, arguments


def test_backends_are_all_in_their_page():
    for status in jtbridge.backends("cpu"):
        assert f"| `{status.name}` |" in TEXTS[DOCS / "backends.md"]


def test_the_page_of_operators_is_up_to_date():
    done = subprocess.run(
        [sys.executable, "-m", "tools.operators", "--check"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_all_pages_are_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert f" {page.relative_to(DOCS)}\n" in navigation, page


def _code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text) + re.findall(r"^```shell\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def _resolves(name: str) -> bool:
    parts = name.split(".")
    if parts[1].isupper() or name.endswith((".py", ".md", ".yml")):
        return True
    value: object = jtbridge
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(value, part) and inspect.ismodule(value):  # a function hides the module of its name
            try:
                importlib.import_module(".".join(parts[:i]))
            except ImportError:
                return False
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True
