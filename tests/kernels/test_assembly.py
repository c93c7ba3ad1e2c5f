"""PTX of kernels as jax-triton compiles it for JAX programs, assembled by the assemblers of the wheels of JAX."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jtbridge
from jtbridge.triton import _assembler
from jtbridge.triton.launches import _adapter

from .harness import ARCHITECTURES, needs_compiler, needs_triton, pretending
from .test_amd import KERNELS

pytestmark = [needs_triton, needs_compiler, pytest.mark.cpu]

# Of jax[cuda12] and jax[cuda13], and the version of PTX that each takes.
WHEELS = {"nvidia-cuda-nvcc-cu12": "8.8", "nvidia-cuda-nvcc": "9.5"}


@pytest.fixture(params=WHEELS)
def wheel(request, monkeypatch) -> Iterator[str]:
    """Make JAX find the assembler of a wheel."""
    tool = assembler_of(request.param)
    monkeypatch.setattr(_assembler, "jax_assembler", lambda: tool)
    _assembler.ptx_version.cache_clear()
    yield request.param
    _assembler.ptx_version.cache_clear()


def assembler_of(wheel: str) -> Path:
    """Return the path of `ptxas` in a wheel."""
    try:
        files = importlib.metadata.files(wheel) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{wheel} is not installed; `make test-kernels` installs it")
    (found,) = [Path(str(file.locate())) for file in files if file.name == "ptxas"]
    found.chmod(0o755)  # if the wheel was not unpacked by pip
    return found


def ptx_of(fn: Callable[..., Any], *args: Any, architecture: int) -> list[str]:
    """Compile the program of a function again, and return the PTX of its kernels."""
    from jax_triton import triton_lib

    texts: list[str] = []
    compile_ttir = triton_lib.compile_ttir_inplace

    def record(*given: Any) -> Any:
        made = compile_ttir(*given)
        texts.append(made.binary)
        return made

    _adapter._made.cache_clear()
    with pytest.MonkeyPatch.context() as patch, pretending(architecture):
        patch.setattr(triton_lib, "compile_ttir_inplace", record)
        if hasattr(triton_lib, "_COMPILED_KERNEL_CACHE"):  # jax-triton 0.3
            patch.setattr(triton_lib, "_COMPILED_KERNEL_CACHE", {})
        else:
            patch.setattr(triton_lib.TritonFunction, "_kernel_cache", property(lambda self: {}))
        jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))
    return texts


def assert_assembled(texts: list[str], wheel: str, architecture: int, folder: Path) -> None:
    target = f"sm_{architecture}" + ("a" if architecture == 90 else "")
    source, binary = folder / "kernel.ptx", folder / "kernel.cubin"
    for text in texts:
        source.write_text(text)
        command = [assembler_of(wheel), "-arch", target, source, "-o", binary]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert binary.stat().st_size > 0
        binary.unlink()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_compiles_to_ptx_that_assembles_with_jax(name, architecture, wheel, tmp_path):
    function, arguments = KERNELS[name]

    def both(*args):
        result, pull = jax.vjp(function, *args)
        return result, pull(result)

    texts = ptx_of(both, *arguments, architecture=architecture)
    assert len(texts) >= (1 if "matmul" in name else 2)  # XLA computes the gradients of a product
    assert_assembled(texts, wheel, architecture, tmp_path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["product", "accumulated"])
def test_user_kernels_compile_to_ptx_that_assembles_with_jax(name, architecture, wheel, tmp_path):
    from tests.launches import alias_kernels, kernels

    function = jtbridge.wrap(kernels.product if name == "product" else alias_kernels.accumulated)
    texts = ptx_of(function, jnp.ones((16, 16)), jnp.ones((16, 16)), architecture=architecture)
    assert len(texts) == (1 if name == "product" else 2)
    assert_assembled(texts, wheel, architecture, tmp_path)


def test_newer_assembler_does_not_change_the_ptx_version(wheel):
    from triton.backends.nvidia import compiler

    own = {c: compiler.ptx_get_version(compiler.get_ptxas(c).version) for c in ARCHITECTURES}
    known = int(WHEELS[wheel].replace(".", ""))
    assert {c: _assembler.ptx_version(c) for c in ARCHITECTURES} == {
        c: known if known < own[c] else None for c in ARCHITECTURES
    }


def test_chip_unknown_to_the_assembler(monkeypatch):
    tool = assembler_of("nvidia-cuda-nvcc-cu12")
    monkeypatch.setattr(_assembler, "jax_assembler", lambda: tool)
    _assembler.ptx_version.cache_clear()
    assert _assembler.ptx_version(110) is None
    _assembler.ptx_version.cache_clear()


@pytest.fixture
def path(monkeypatch, tmp_path) -> Callable[..., None]:
    """Return a function that puts fake assemblers of some versions on `PATH`, each in a folder of that name."""
    from jax_triton import triton_lib  # noqa: F401  (imports JAX's plugin)

    def put(*versions: str) -> None:
        for version in versions:
            folder = tmp_path / version
            folder.mkdir()
            (folder / "ptxas").write_text(f"#!/bin/sh\necho Cuda compilation tools, release, V{version}\n")
            (folder / "ptxas").chmod(0o755)
        monkeypatch.setenv("PATH", os.pathsep.join(["/nowhere", *(str(tmp_path / version) for version in versions)]))

    return put


def test_the_first_assembler_on_PATH_with_a_supported_version_is_used(path, tmp_path):
    path("11.7.99", "12.3.103", "12.4.1", "13.1.2")
    assert _assembler.jax_assembler() == tmp_path / "12.4.1" / "ptxas"


def test_assembler_of_the_wheel_is_used_if_none_on_PATH(path, monkeypatch):
    path("not a version")
    plugin = next(name for name in _assembler._PLUGINS if f"{name}._triton" in _assembler.sys.modules)
    found = list(_assembler._assembler_paths(plugin))
    wheels = {"jax_cuda12_plugin": "nvidia-cuda-nvcc-cu12", "jax_cuda13_plugin": "nvidia-cuda-nvcc"}
    assert assembler_of(wheels[plugin]).resolve() in found
    monkeypatch.setattr(_assembler, "_assembler_paths", lambda plugin: iter(found[-2:]))
    assert _assembler.jax_assembler() == assembler_of(wheels[plugin]).resolve()


def test_jax_without_nvidia_support_has_no_assembler(monkeypatch):
    monkeypatch.setattr(_assembler, "_PLUGINS", {})
    assert _assembler.jax_assembler() is None
