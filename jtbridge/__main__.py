"""The command line: ``python -m jtbridge doctor``, and ``--version`` for the versions of jtbridge, jax and torch."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from typing import TextIO

import jax
import torch

from jtbridge.core.version import __version__


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jtbridge", description="Any PyTorch function as a JAX function.")
    versions = f"jtbridge {__version__}, jax {jax.__version__}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=f"{versions}, Python {platform.python_version()}")
    commands = parser.add_subparsers(dest="command")
    doctor = commands.add_parser("doctor", help="check the installation and the machine")
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.add_argument("--only", metavar="GROUPS", help="groups of checks to run, such as versions,caches")
    doctor.add_argument("--timeout", type=float, default=120.0, help="seconds that a check may take (default: 120)")
    arguments = parser.parse_args()
    if arguments.command == "doctor":
        from jtbridge.diagnosis._doctor import main as run_doctor

        return run_doctor(arguments)
    parser.print_help()
    return 0


if __name__ == "__main__":
    stdout: TextIO | None = sys.stdout  # None if the process was started without a stdout
    try:
        status = main()
        if stdout is not None:
            stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, as in `python -m jtbridge doctor | head`
        if stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())  # Python flushes stdout at exit
        status = 1
    sys.exit(status)
