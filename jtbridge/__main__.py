"""``python -m jtbridge --version``: the versions of jtbridge, jax, torch and Python."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

import jax
import torch


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jtbridge", description="Any PyTorch function as a JAX function.")
    versions = f"jtbridge {importlib.metadata.version('jtbridge')}, jax {jax.__version__}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=f"{versions}, Python {platform.python_version()}")
    parser.parse_args()
    parser.print_help()


if __name__ == "__main__":
    main()
