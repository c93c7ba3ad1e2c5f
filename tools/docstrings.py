"""Converts docstrings, which are written for `help()` with Sphinx's roles, to Markdown for the reference pages."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|mod|meth|attr):`~?([^`]+)`")


class Docstrings(griffe.Extension):
    """Turn roles and double backticks into Markdown's code, and `Example:` into the section that griffe knows."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            text = re.sub(r"``(.+?)``", r"`\1`", text)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
