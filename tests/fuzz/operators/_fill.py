"""Fill in the templates of statements."""

from __future__ import annotations

from typing import Any

from tests.fuzz.programs import Writer


def fill(w: Writer, row: tuple[str, ...], fields: dict[str, Any]) -> str:
    """Write the expression of a row of a table with its fields and some random literals; return the new variable."""
    text = " ".join(row)
    if "{d}" in text:
        fields["d"] = w.dim(fields["x"])
    if "{e}" in text:
        fields["e"] = w.dim(fields["m"])
    if "{f}" in text:
        fields["f"] = w.dim(fields["i"])
    fields["n"] = w.number() or 0.5
    fields["p"] = abs(w.number()) + 0.25
    expression, *guards = (part.format(**fields) for part in row)
    return w.let(expression, *guards)
