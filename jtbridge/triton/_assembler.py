"""The version of PTX that kernels in JAX programs are compiled to.

Triton compiles a kernel to PTX of the version that belongs to its own assembler. In a JAX program jaxlib assembles the
kernel, with the program `ptxas` of the CUDA that it finds. An assembler refuses PTX that is newer than itself: Triton
3.9 emits 9.4 for an H100, and the assembler of ``jax[cuda12]``, of CUDA 12.9, takes up to 8.8.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# For each CUDA plugin of JAX, the folder of the wheel with the assembler, relative to the folder of installed packages.
_PLUGINS = {"jax_cuda13_plugin": "nvidia/cu13", "jax_cuda12_plugin": "nvidia/cuda_nvcc"}


@functools.cache
def ptx_version(capability: int) -> int | None:
    """Return the version of PTX to compile to for a compute capability, 88 for 8.8; None for Triton's own choice.

    The result is None, too, if JAX's assembler does not know the chip: jaxlib then lets the driver compile the PTX.
    """
    from triton.backends.nvidia import compiler

    assembler = jax_assembler()
    if assembler is None:
        return None
    known = compiler.ptx_get_version(".".join(map(str, _assembler_version(assembler)[:2])))
    if known >= compiler.ptx_get_version(compiler.get_ptxas(capability).version):
        return None
    return known if _accepts_ptx(assembler, known, compiler.sm_arch_from_capability(capability)) else None


def jax_assembler() -> Path | None:
    """Return the assembler that jaxlib runs for Triton kernels; None if this process's JAX is not for NVIDIA GPUs.

    The order of the candidates is that of XLA's ``FindPtxAsExecutable``, to which jaxlib passes no preferred folder.
    """
    plugin = next((name for name in _PLUGINS if f"{name}._triton" in sys.modules), None)
    if plugin is None:
        return None
    return next(
        (path for path in _assembler_paths(plugin) if (11, 8) <= _assembler_version(path) != (12, 3, 103)), None
    )


def _assembler_paths(plugin: str) -> Iterator[Path]:
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield Path(folder) / "ptxas"
    packages = Path(str(sys.modules[f"{plugin}._triton"].__file__)).resolve().parent.parent
    for root in ("/usr/local/cuda", "/opt/cuda", packages / _PLUGINS[plugin], packages.parents[2]):
        yield Path(root) / "bin" / "ptxas"


@functools.cache
def _assembler_version(assembler: Path) -> tuple[int, ...]:
    """Return the version of an assembler, such as (12, 9, 86); () if it cannot be run."""
    try:
        text = subprocess.run([assembler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ()
    match = re.search(r"\bV(\d+)\.(\d+)\.(\d+)\b", text)
    return tuple(map(int, match.groups())) if match else ()


def _accepts_ptx(assembler: Path, version: int, target: str) -> bool:
    """Return whether an assembler accepts PTX of a version for a chip, tried with a program without kernels."""
    text = f".version {version // 10}.{version % 10}\n.target {target}\n.address_size 64\n"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.ptx"
        source.write_text(text)
        command = [assembler, "-arch", target, source, "-o", Path(folder) / "empty.cubin"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
