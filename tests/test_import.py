"""Importing jtbridge changes nothing and loads nothing heavy, and its files import only in the order of `LAYERS`."""

from __future__ import annotations

import ast
import graphlib
import pathlib
import re
import runpy
import subprocess
import sys

import pytest
import torch

import jtbridge

PACKAGE = pathlib.Path(jtbridge.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# A file imports only from rows that precede its own in this list, and from its own folder.
LAYERS: list[set[str]] = [
    {"errors"},
    {"_compat"},
    {"core"},
    {"state", "triton", "reverse"},
    {"transforms", "lowerings"},
    {"capture", "kernels"},
    {"translate"},
    {"_backends"},
    {"primitives"},
    {"calls"},
    {"reports", "_export", "models"},
    {"diagnosis"},
    {"__init__", "__main__"},
]
ROW = {name: row for row, names in enumerate(LAYERS) for name in names}


def unit(path: pathlib.Path) -> str:
    """Return the folder or file at the package's top level that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(path: pathlib.Path) -> set[str]:
    """Return the units that a file imports, also inside functions."""
    found = set()
    folder = path.relative_to(PACKAGE.parent).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            names = [(*base, alias.name) for alias in node.names]
        for name in names:
            if name[0] == "jtbridge":
                found.add(name[1] if len(name) > 1 and name[1] in ROW else "__init__")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_import_only_from_preceding_rows(path: pathlib.Path):
    here = unit(path)
    assert here in ROW, f"`{here}` has no row in `LAYERS`: add it after everything that it imports"
    for other in imported_units(path) - {here}:
        assert ROW[other] < ROW[here], f"`{path.name}` of `{here}` imports `{other}`, whose row does not precede it"


def test_rows_name_existing_files():
    assert {unit(path) for path in FILES} == set(ROW)


def module_of(path: pathlib.Path) -> str:
    """Return the dotted name of a file; for `__init__.py`, the name of its folder."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: pathlib.Path) -> set[str]:
    """Return the modules of the package that a file imports when it runs, also inside functions."""
    modules = {module_of(file) for file in FILES}
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    folder = path.relative_to(PACKAGE.parent).parent.parts
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else ()
            base = ".".join((*base, node.module) if node.module else base)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add(whole if whole in modules else base)
    return found & modules - {module_of(path)}


def test_no_files_import_one_another_in_a_circle():
    graph = {module_of(path): imported_modules(path) for path in FILES}
    assert sum(map(len, graph.values())) > len(graph)  # the imports are found
    graphlib.TopologicalSorter(graph).prepare()  # raises for a circle


HOMES = {"_compat": ("torch", "jax", "jaxlib", "functorch"), "triton": ("triton",)}
# Attributes of instances of torch's classes, which `dir` of the classes does not show.
OF_TORCH = {
    name
    for value in (
        torch.empty(1),
        torch.ops.aten.add.Tensor,
        torch.ops.aten.add,
        torch.nn.Linear(1, 1),
        torch.nn.Linear(1, 1).state_dict(),
        torch.fx.Graph(),
    )
    for name in dir(value)
    if name.startswith("_") and not name.startswith("__")
}


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for a chain of attributes of a name; "" for other nodes."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


# Private names that are given to `getattr` and its like outside `_compat`, and whose they are.
OF_OTHERS = {"_make": "collections.namedtuple", "_can_compile_fullgraph": "transformers"}


def name_in_string(node: ast.AST) -> tuple[str, str] | None:
    """Return the object and the private name that a call such as ``getattr(x, "_name")`` names by a string."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return None
    name = node.args[1]
    accesses = dotted(node.func).rpartition(".")[2] in ("getattr", "hasattr", "setattr", "delattr")
    if not accesses or not isinstance(name, ast.Constant) or not re.match("_(?!_|jtbridge_)", str(name.value)):
        return None
    return dotted(node.args[0]), name.value


def private_uses(source: str) -> set[str]:
    """Return the private names of torch, JAX and Triton that a file imports, or reads by chains of attributes.

    A private name in a string counts too, for every object except `self` and `cls`: few objects of this package have
    attributes that are read in this way, and those of other libraries are in `OF_OTHERS`.
    """
    tree = ast.parse(source)
    names: dict[str, str] = {}  # the local name of each import, and its full name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
    used = set(names.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            if first in names:
                used.add(f"{names[first]}.{rest}")
            elif node.attr in OF_TORCH and first not in ("self", "cls"):
                used.add(f"torch.(...).{node.attr}")
        elif by_string := name_in_string(node):
            (first, _, rest), name = by_string[0].partition("."), by_string[1]
            if first in names:
                used.add(".".join(filter(None, (names[first], rest, name))))
            elif by_string[0] not in ("self", "cls") and name not in OF_OTHERS:
                used.add(f"torch.(...).{name}")
    libraries = "|".join(library for names in HOMES.values() for library in names)
    found = {name for name in used if re.match(rf"({libraries})\.(.*\.)?_(?!_)", name)}
    return {name for name in found if not name.startswith("torch.ops.")}  # operators of that name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_library_names_are_used_only_in_allowed_files(path: pathlib.Path):
    allowed = HOMES.get(unit(path), ()) if path.name != "__init__.py" else ()
    assert {name for name in private_uses(path.read_text()) if name.partition(".")[0] not in allowed} == set()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._C._get_tracing_state()", "torch._C._get_tracing_state"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("from torch import nn\nnn.modules._functions.f()", "torch.nn.modules._functions"),
        ("import jax.interpreters.ad as ad\nad._x", "jax.interpreters.ad._x"),
        ("def f(x):\n    return x.grad._version", "torch.(...)._version"),
        ("def f(op):\n    return g(op)._schema", "torch.(...)._schema"),
        ("def f(state_dict):\n    return state_dict._metadata", "torch.(...)._metadata"),
        ("def f(op):\n    return getattr(op.target, '_schema', None)", "torch.(...)._schema"),
        ("import torch\nhasattr(torch.nn.Linear, '_x')", "torch.nn.Linear._x"),
        ("import jax\nsetattr(jax, '_x', 1)", "jax._x"),
        ("def f(x):\n    delattr(x.hook, '_tensor_name')", "torch.(...)._tensor_name"),
    ],
)
def test_private_uses_are_found(source: str, name: str):
    assert name in private_uses(source)


IMPORT = """
import os, sys, warnings
import jax, torch
warnings.simplefilter("error")
def state():
    return (dict(os.environ), torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
            dict(jax.config.values), torch.get_rng_state().tolist(), list(warnings.filters), list(sys.path))
before, loaded = state(), set(sys.modules)
import jtbridge
assert state() == before, "importing changed a setting"
jax.config.update("jax_num_cpu_devices", 3)
assert len(jax.devices("cpu")) == 3, "importing started JAX's backends"
import jax.numpy as jnp
f, x = jtbridge.wrap(lambda a, b: torch.sin(a) * b), jnp.arange(3.0)
f(x, x)
jax.grad(lambda a: f(a, x).sum())(x)
jax.vmap(f)(x, x)
large = jnp.ones((2, 100_000))  # shared with torch, and protected
f(large, large)
jax.grad(lambda a: f(a, large).sum())(large)
jax.vmap(f)(large, large)
print(*[name for name in HEAVY if name in set(sys.modules) - loaded])
"""
HEAVY = (
    *("triton", "jax_triton", "transformers", "torch._dynamo", "torch._inductor", "torch.export", "sympy"),
    *("jtbridge.capture", "jtbridge.translate", "jtbridge.lowerings", "jtbridge.kernels", "jax.extend"),
)


def test_import_and_eager_calls_load_no_heavy_modules():
    done = subprocess.run(
        [sys.executable, "-c", f"HEAVY = {HEAVY!r}\n{IMPORT}"],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_star_import_gives_the_public_names():
    names: dict[str, object] = {}
    exec("from jtbridge import *", names)
    assert {name for name in names if not name.startswith("__")} == set(jtbridge.__all__)


def test_the_command_line_prints_versions(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jtbridge", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("jtbridge", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"jtbridge {jtbridge.__version__}, jax ")
    monkeypatch.setattr(sys, "argv", ["jtbridge"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("jtbridge", run_name="__main__")
    assert not ended.value.code
    assert "--version" in capsys.readouterr().out


def test_the_typed_program_uses_every_public_name():
    """`make lint` checks this program by pyright in strict mode."""
    program = (PACKAGE.parent / "tests" / "packaging" / "typed_use.py").read_text()
    unused = [name for name in jtbridge.__all__ if not re.search(rf"jtbridge\.{name}\b|import .*\b{name}\b", program)]
    assert not unused
