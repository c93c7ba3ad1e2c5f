"""Importing jtbridge changes nothing and loads nothing heavy, and its files import only from below."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

import pytest

import jtbridge

PACKAGE = pathlib.Path(jtbridge.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# From bottom to top. A file imports from rows below its own, and from its own folder.
LAYERS: list[set[str]] = [
    {"errors", "_nesting", "_pickling"},
    {"_compat", "_dtypes", "_retracing"},
    {"_static"},
    {"_pytree", "_torch_state", "_rng", "_composite", "_batch_statistics", "_debug", "_writes", "_vmap_guard"},
    {"_functions"},
    {"_host", "_run", "_declared", "_rules"},
    {"state", "triton"},
    {"_transforms", "lowerings"},
    {"_convert", "capture", "kernels"},
    {"_signature"},
    {"translate"},
    {"backends"},
    {"primitives"},
    {"eager"},
    {"_config"},
    {"_verify"},
    {"_traced"},
    {"_wrap"},
    {"_check", "_explain", "_export", "_purity"},
    {"__init__"},
    {"__main__"},
]
ROW = {name: row for row, names in enumerate(LAYERS) for name in names}


def unit(path: pathlib.Path) -> str:
    """The folder or file of the package's top level that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(path: pathlib.Path) -> set[str]:
    """The units that a file imports, inside functions too."""
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
            if name[0] == "jtbridge" and len(name) > 1:
                found.add(name[1])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_import_from_below(path: pathlib.Path):
    here = unit(path)
    assert here in ROW, f"`{here}` has no row: add it where it belongs"
    for other in imported_units(path) - {here}:
        assert ROW[other] < ROW[here], f"`{path.name}` of `{here}` imports `{other}`, which is not below it"


def test_rows_name_what_exists():
    assert {unit(path) for path in FILES} == set(ROW)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_modules_of_torch_and_jax_are_imported_in_one_folder(path: pathlib.Path):
    private = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            private += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            private += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("torch", "jax"):
            private.append(f"{node.value.id}.{node.attr}")
    private = [name for name in private if re.match(r"(torch|jax)\..*\b_(?!_)|(torch|jax)\._(?!_)", name)]
    at_home = path.parent.name == "_compat" and path.name != "__init__.py"
    assert at_home or not private, private


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
print(*[name for name in HEAVY if name in set(sys.modules) - loaded])
"""
HEAVY = (
    *("triton", "jax_triton", "transformers", "torch._dynamo", "torch._inductor", "torch.export", "sympy"),
    *("jtbridge.capture", "jtbridge.translate", "jtbridge.lowerings", "jtbridge.kernels", "jax.extend"),
)


def test_import_and_eager_calls_load_nothing_heavy_and_import_changes_nothing():
    done = subprocess.run(
        [sys.executable, "-c", f"HEAVY = {HEAVY!r}\n{IMPORT}"],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_public_names_are_those_of_all():
    names: dict[str, object] = {}
    exec("from jtbridge import *", names)
    assert {name for name in names if not name.startswith("__")} == set(jtbridge.__all__)
