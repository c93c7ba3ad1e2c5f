"""PTX of the kernels, assembled by the assembler that XLA uses: the one of the wheels that JAX requires."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

import jax
import pytest

from .harness import ARCHITECTURES, launches, made_for, needs_compiler, needs_triton
from .test_amd import KERNELS

pytestmark = [needs_triton, needs_compiler]

# Of jax[cuda12] and jax[cuda13].
WHEELS = ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc")


def assembler(wheel: str) -> Path:
    """The program `ptxas` of a wheel."""
    try:
        files = importlib.metadata.files(wheel) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{wheel} is not installed; `make test-kernels` installs it")
    (found,) = [Path(str(file.locate())) for file in files if file.name == "ptxas"]
    found.chmod(0o755)  # a wheel that was unpacked otherwise than by pip
    return found


def is_too_new(wheel: str, architecture: int) -> bool:
    """Whether Triton emits PTX for an architecture that an assembler does not know: 9.4, where CUDA 12.9 knows 8.8."""
    import triton

    version = tuple(map(int, triton.__version__.split(".")[:2]))
    return version >= (3, 9) and wheel.endswith("-cu12") and architecture >= 90


@pytest.mark.parametrize("wheel", WHEELS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_compiles_to_what_jaxs_assembler_takes(name, architecture, wheel, tmp_path):
    tool = assembler(wheel)
    function, arguments = KERNELS[name]

    def both(*args):
        result, pull = jax.vjp(function, *args)
        return result, pull(result)

    target = f"sm_{architecture}" + ("a" if architecture == 90 else "")
    for launch in launches(both, *arguments):
        text, binary = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
        text.write_text(made_for(launch, "cuda", architecture, 32).asm["ptx"])
        command = [tool, "-arch", target, text, "-o", binary]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if is_too_new(wheel, architecture):  # the doctor says so, and `make test-gpu` installs an older Triton
            assert "Unsupported .version 9.4" in done.stderr, launch.kernel.__name__
        else:
            assert done.returncode == 0, f"{launch.kernel.__name__}: {done.stderr}"
            assert binary.stat().st_size > 0
