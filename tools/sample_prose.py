"""Print docstrings and comments of jtbridge at random: can each be understood without the code around it?

python tools/sample_prose.py --count 60 --seed 0
"""

from __future__ import annotations

import argparse
import ast
import io
import pathlib
import random
import sys
import tokenize

ROOT = pathlib.Path(__file__).parent.parent


def prose(path: pathlib.Path) -> list[tuple[str, str]]:
    """Return the docstrings and comments of a file, each with its place."""
    source, place = path.read_text(), path.relative_to(ROOT)
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            found.append((f"{place}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', 'module')}", text))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# noqa", "# ruff")):
            found.append((f"{place}:{token.start[0]}", token.string))
    return found


def main() -> None:
    """Print the sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    everything = [each for path in sorted((ROOT / "jtbridge").rglob("*.py")) for each in prose(path)]
    for place, text in random.Random(arguments.seed).sample(everything, arguments.count):
        sys.stdout.write(f"{place}\n    {text}\n")


if __name__ == "__main__":
    main()
