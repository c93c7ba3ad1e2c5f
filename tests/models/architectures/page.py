"""The page of the docs about architectures, written from results."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from .table import KINDS, ROWS

_HEAD = """\
# Architectures

<!-- Written by `python -m tests.models.architectures --write docs/architectures.md`. -->

Each row is a class of `transformers` {version} with small sizes, random weights and a batch of two. Its results and the
gradients of all its parameters are computed under `jax.jit`, through [`jtbridge.module`](models.md) with
`backend="auto"`, and are compared with torch in float32. {right} of {total} agree with torch, and {whole} of these are
translated.{left} LLVM's optimisations are off, because each program runs once.

"Translated" means that XLA computes everything. "Called" means that torch runs inside the compiled program; the reason
is given. The differences are relative to the largest element of a result, and of the gradient of one parameter.
"""


def page(results: Iterable[dict[str, Any]]) -> str:
    """Return the page in Markdown."""
    import transformers

    found = {result["name"]: result for result in results}
    right = [result for result in found.values() if result["verdict"] in ("translated", "called")]
    whole = [result for result in right if result["verdict"] == "translated"]
    left = len(ROWS) - len(found)
    text = _HEAD.format(
        version=transformers.__version__,
        right=len(right),
        total=len(found),
        whole=len(whole),
        left=f" {left} more rows of the table have not been compared." if left else "",
    )
    for kind, rows in KINDS.items():
        lines = [_line(found[name]) for name in rows if name in found]
        if lines:
            head = "| model | class | under `jit` | forward | gradient |\n| --- | --- | --- | --- | --- |\n"
            text += f"\n## {kind[0].upper()}{kind[1:]}\n\n{head}" + "\n".join(lines) + "\n"
    return text


def _line(result: dict[str, Any]) -> str:
    def figure(key: str) -> str:
        return "" if result.get(key) is None else f"{result[key]:.0e}"

    reason = re.split(r"(?<=\.) (?=[A-Z])", result["reason"] or "")[0]  # the first sentence of a message
    verdict = result["verdict"] + (f": {reason.replace('|', '/')}" if reason else "")
    name = result["name"]
    return f"| {name} | `{ROWS[name].model}` | {verdict} | {figure('forward')} | {figure('gradient')} |"
