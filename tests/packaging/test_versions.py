"""The files that name versions of the same tool agree."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_pre_commit_ruff_has_the_version_of_make_lint():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    (revision,) = re.findall(r"repo: \S*/ruff-pre-commit\n\s*rev: v(\S+)\n", hooks)
    (pinned,) = re.findall(r"^ruff==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert revision == pinned
