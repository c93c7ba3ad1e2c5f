"""``python -m tests.gpu``: fail unless this machine's GPU runs kernels, and prove them.

`make test-gpu` runs this first: without a GPU or Triton, the tests that follow would compute in jnp, and pass.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable

import jax
import torch

import jtbridge
from jtbridge.diagnosis import ProofReport
from jtbridge.diagnosis._requirements import version_of
from jtbridge.triton import jax_assembler, unsupported_reason


def missing_gpu_reason() -> str | None:
    """Return why no kernel can run on a GPU here; None if nothing is known to prevent it."""
    if jax.default_backend() != "gpu":
        return f'JAX\'s default backend is "{jax.default_backend()}": install jax[cuda12] or jax[cuda13]'
    reason = unsupported_reason("rocm" if torch.version.hip else "cuda")
    if reason is not None:
        return f"Triton cannot be used: {reason}"
    return None if torch.cuda.is_available() else "this torch has no GPU"


def versions() -> str:
    """Return the versions of Python, the packages and the assembler of kernels in one line."""
    packages = ("jax", "jaxlib", "torch", "triton", "jax-triton")
    found = [f"{name} {version_of(name)}" for name in packages]
    cuda = torch.version.cuda or torch.version.hip
    return ", ".join([f"Python {platform.python_version()}", *found, f"torch for {cuda}", f"ptxas {jax_assembler()}"])


def main(prove: Callable[[], ProofReport] = jtbridge.prove) -> int:
    """Return the exit status: 0 if every kernel is right."""
    reason = missing_gpu_reason()
    if reason is not None:
        sys.stderr.write(f"No kernel runs on a GPU here: {reason}.\n")
        return 1
    sys.stdout.write(f"{versions()}\n")
    report = prove()
    sys.stdout.write(f"{report}\n")
    return 0 if report.proven and not report.failed else 1


if __name__ == "__main__":
    sys.exit(main())
