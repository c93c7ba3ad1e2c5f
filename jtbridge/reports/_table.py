"""Reports as text."""

from __future__ import annotations

from collections.abc import Sequence


def as_table(rows: Sequence[tuple[str, str]]) -> str:
    """Return pairs of heading and text as lines, with the texts in one column."""
    width = max(len(heading) for heading, _ in rows)
    return "\n".join(f"{heading:<{width}}  {text}" for heading, text in rows)
