"""The contents of closure cells. The cell of a variable that is not assigned yet is empty, and reading it raises."""

from __future__ import annotations

import types
from typing import Any

_EMPTY = object()


def read_cell(cell: types.CellType, default: Any = None) -> Any:
    """Return the contents of a closure cell, or `default` if the cell is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return default


def closure_contents(function: Any) -> list[Any]:
    """Return the contents of the cells that a function closes over, without empty cells.

    A callable of another kind may have no closure, and a proxy has an attribute of any name.
    """
    cells = getattr(function, "__closure__", None)
    if not isinstance(cells, tuple):
        return []
    return [contents for cell in cells if (contents := read_cell(cell, _EMPTY)) is not _EMPTY]
