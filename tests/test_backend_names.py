"""The table of the backends' names is right, and other files take the names from it."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

import jtbridge
from jtbridge._backends._registry import backend_named
from jtbridge.core import backend_names

PACKAGE = pathlib.Path(jtbridge.__file__).parent
NAMES = (*backend_names.TRANSLATING, *backend_names.CALLING)
FILES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if "_backends" not in path.parts and path != PACKAGE / "core" / "backend_names.py"
]
NAME = f"({'|'.join(NAMES)})"
# A name in quotes inside a longer text, or beside the word "backend".
IN_TEXT = re.compile(rf"""["'`]{NAME}["'`]|\bbackends?\b[^\w.,]{{1,3}}{NAME}\b|\b{NAME}[^\w.,]{{1,2}}backends?\b""")


def test_the_table_has_every_backend():
    found = [(status.name, status.kind) for status in jtbridge.backends("cpu")]
    kinds = {"translate": backend_names.TRANSLATING, "call": backend_names.CALLING}
    assert sorted(found) == sorted((name, kind) for kind, names in kinds.items() for name in names)
    for kind, names in kinds.items():
        assert [name for name, of_kind in found if of_kind == kind] == list(names)


def test_the_names_of_the_table_have_their_meaning():
    assert backend_named(backend_names.WITH_KERNELS).uses_kernels
    assert not backend_named(backend_names.WITHOUT_KERNELS).uses_kernels
    assert not backend_named(backend_names.ON_DEVICE).on_host
    assert backend_named(backend_names.ON_HOST).on_host


def named_backends(source: str) -> set[str]:
    """Return the parts of a file that name a backend: texts except docstrings, options, and tuples of names."""
    tree = ast.parse(source)
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in docstrings and IN_TEXT.search(str(node.value)):
            found.add(str(node.value))
        if isinstance(node, ast.keyword) and node.arg == "backend" and _is_name(node.value):
            found.add(ast.unparse(node))
        items = list(map(ast.unparse, node.elts)) if isinstance(node, ast.Tuple | ast.List | ast.Set) else []
        if len(set(items)) > 1 and all(item in map(repr, NAMES) for item in items):
            found.add(ast.unparse(node))
        if isinstance(node, ast.Compare) and "backend" in ast.unparse(node) and any(map(_is_name, node.comparators)):
            found.add(ast.unparse(node))
    return found


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in NAMES


def test_other_files_name_no_backend():
    found = {path.relative_to(PACKAGE).as_posix(): named_backends(path.read_text()) for path in FILES}
    assert found
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("""raise E('Use `backend="xla"` alone.')""", 'Use `backend="xla"` alone.'),
        ("""raise E(f'Choose "auto" or "xla", not {x}.')""", 'Choose "auto" or "xla", not '),
        ("raise E('eager calls and the backend `dlpack` do not')", "eager calls and the backend `dlpack` do not"),
        ("raise E('the triton backend')", "the triton backend"),
        ("raise E('one of backend callback')", "one of backend callback"),
        ("wrap(f, backend='xla')", "backend='xla'"),
        ("for name in ('dlpack', 'callback'): f(name)", "('dlpack', 'callback')"),
        ("if self.backend == 'dlpack': f()", "self.backend == 'dlpack'"),
    ],
)
def test_names_of_backends_are_found(source: str, text: str):
    assert named_backends(source) == {text}


@pytest.mark.parametrize(
    "source",
    [
        '"""Choose `backend="xla"`."""',
        "version('triton')",
        "raise E('Triton kernels need a GPU: import triton')",
        "raise E('a callback of the backend. XLA calls it')",
        "names = ('triton', 'cudnn')",
        "module, package = ('triton', 'triton')",
    ],
)
def test_the_libraries_of_these_names_are_no_backends(source: str):
    assert named_backends(source) == set()
