"""``python -m tests.docs PAGE ...`` runs the Python blocks of pages, and prints the outcome of each."""

from __future__ import annotations

import pathlib
import sys

from .blocks import run_page


def main() -> int:
    failed = False
    for page in sys.argv[1:]:
        for block, outcome in run_page(pathlib.Path(page)):
            sys.stdout.write(f"{page}:{block.line}: {outcome}\n")
            failed |= outcome.startswith("failed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
