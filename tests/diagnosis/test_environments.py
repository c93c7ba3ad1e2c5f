"""Broken environments: the report names each of them with its remedy, and the other checks do not fail."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import torch

import jtbridge
from jtbridge import triton
from jtbridge.diagnosis import _machine, _requirements
from jtbridge.diagnosis.checks import caches, environment, libraries, versions
from jtbridge.triton import _versions
from tests.kernels.harness import needs_compiler, needs_triton

from .conftest import named

# Hides modules and their metadata from a child, as if they were not installed.
WITHOUT = """
import importlib.abc, importlib.metadata, sys
HIDDEN = {hidden}
class Hiding(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
real, spec = importlib.metadata.distribution, importlib.util.find_spec
def distribution(name):
    if name.replace("-", "_") in HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.distribution = distribution
importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] in HIDDEN else spec(name, package)
sys.meta_path.insert(0, Hiding())
"""


# Makes the children treat their CPU as a GPU for which kernels are compiled.
ON_CPU = "\nimport importlib\nimportlib.import_module('jtbridge._backends.xla').GPU_PLATFORMS = ('cpu',)"


def without(*modules: str) -> str:
    return WITHOUT.format(hidden=set(modules))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Return a function that changes the versions in the metadata of packages; None means that it is not installed."""
    versions: dict[str, str | None] = {}
    real, spec = importlib.metadata.version, importlib.util.find_spec

    def version(name: str) -> str:
        found = versions.get(name, ...)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name) if found is ... else found

    def find_spec(name: str, package: str | None = None):
        missing = name.replace("_", "-") in versions and versions[name.replace("_", "-")] is None
        return None if missing else spec(name, package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    _versions.unsupported_reason.cache_clear()
    yield versions
    _versions.unsupported_reason.cache_clear()


def found_by(run) -> dict[str, tuple[str, str, str]]:
    return {finding.name: (finding.status, finding.text, finding.fix) for finding in run()}


@pytest.mark.parametrize("package", ["triton", "jax-triton"])
def test_no_triton(installed, package, monkeypatch):
    installed[package] = None
    status, text, fix = found_by(versions._packages)[package]
    assert (status, fix) == ("note", f"pip install '{package}{versions._OPTIONAL[package][0]}'")
    assert text.startswith("it is not installed, and needed for: Triton kernels")
    monkeypatch.setattr(versions, "nvidia_driver", lambda: "550.54")  # with a GPU it is missed
    assert found_by(versions._packages)[package][0] == "warning"


@needs_compiler
def test_no_triton_in_the_children(prelude, only):
    only("availability", "jit, translated")
    prelude(without("triton", "jax_triton") + ON_CPU)
    report = jtbridge.doctor(timeout=60)
    assert named(report, "triton").text == "`triton` is not installed"
    assert named(report, "jit, translated").status == "ok"
    assert report.healthy


def test_an_old_jax_triton(installed):
    installed["jax-triton"] = "0.2.0"
    status, text, fix = found_by(versions._packages)["jax-triton"]
    assert (status, text) == ("warning", "0.2.0 is not >=0.3.1; no kernel runs on a GPU")
    assert fix == "pip install 'jax-triton>=0.3.1'"


@needs_triton
def test_incompatible_triton_versions(installed, monkeypatch):
    installed |= {"jax-triton": "0.4.1", "triton": "3.6.0"}
    monkeypatch.setattr(_versions, "passes_aliases_twice", lambda: False)
    status, text, fix = found_by(versions._jax_triton)["jax-triton and triton"]
    assert status == "warning"
    assert text.startswith("jax-triton 0.4.1 needs Triton 3.7 or newer, but Triton 3.6.0 is installed")
    assert "jax-triton 0.4.1 with Triton 3.7" in fix


@needs_triton
def test_a_missing_plugin(installed, monkeypatch):
    installed |= {"jax-triton": "0.3.1", "jax-cuda12-plugin": None, "jax-cuda13-plugin": None}

    def fails():
        raise ImportError("cannot import name 'gpu_triton' from 'jax._src.lib'")

    monkeypatch.setattr(_versions, "import_jax_triton", fails)
    status, text, fix = found_by(versions._jax_triton)["jax-triton and triton"]
    assert status == "warning"
    assert text.startswith("jax-triton cannot be imported: ImportError: cannot import name 'gpu_triton'")
    jaxlib = importlib.metadata.version("jaxlib")
    assert fix == f"jax-triton 0.3 needs JAX's CUDA plugin: pip install --no-deps jax-cuda12-plugin=={jaxlib}"


def test_a_gpu_without_jaxs_plugin(installed, monkeypatch):
    installed |= dict.fromkeys(versions._PLUGINS)
    assert found_by(versions._plugin) == {}
    monkeypatch.setattr(versions, "nvidia_driver", lambda: "550.54")
    status, text, fix = found_by(versions._plugin)["jax-cuda12-plugin"]
    assert (status, fix) == ("warning", "pip install 'jax[cuda12]'")
    assert "JAX computes on the CPU" in text


def test_a_plugin_of_another_version(installed):
    installed |= {"jax-cuda12-plugin": "0.9.1", "jaxlib": "0.10.2"}
    status, text, fix = found_by(versions._plugin)["jax-cuda12-plugin"]
    assert (status, fix) == ("warning", "pip install 'jax-cuda12-plugin==0.10.2'")
    assert text == "0.9.1 is not of the version of jaxlib, 0.10.2: JAX does not load it"


def test_versions_that_are_too_old(installed):
    installed |= {"jax": "0.9.2", "torch": "2.4.0+cpu", "numpy": "1.26.4"}
    found = found_by(versions._packages)
    assert found["jax"] == ("failure", "0.9.2 is not >=0.10", "pip install 'jax>=0.10'")
    assert found["torch"] == ("failure", "2.4.0+cpu is not >=2.11", "pip install 'torch>=2.11'")
    assert found["numpy"][0] == "failure"
    assert not jtbridge.doctor(["versions"]).healthy


def test_jaxlib_of_another_version(installed):
    installed["jaxlib"] = "0.9.0"
    status, text, _ = found_by(versions._jax_and_jaxlib)["jax and jaxlib"]
    assert status == "failure"
    assert "requires jaxlib " in text
    assert text.endswith("but 0.9.0 is installed")


def test_an_old_python(monkeypatch):
    monkeypatch.setattr(versions.platform, "python_version", lambda: "3.10.4")
    assert found_by(versions._python)["python"] == (
        "failure",
        "3.10.4 is older than 3.11",
        "Use Python 3.11 or newer.",
    )


def test_torch_whose_float16_products_are_wrong(installed, monkeypatch):
    assert found_by(versions._torch_float16) == {}
    installed["torch"] = "2.14.0+cpu"
    status, text, fix = found_by(versions._torch_float16)["torch, float16"]
    assert status == "warning"
    assert "float16 products on a CPU wrongly" in text
    assert "another version of torch" in fix


def test_float16_products_are_checked(prelude, only):
    only("float16 products of torch")
    prelude("import torch\nright = torch.Tensor.__matmul__\ntorch.Tensor.__matmul__ = lambda a, b: right(a, b) * 1.02")
    found = named(jtbridge.doctor(timeout=60), "float16 products of torch")
    assert found.status == "failure"
    assert found.text.startswith("wrong value: ")
    assert found.fix == "Use another version of torch."


@needs_triton
def test_assembler_of_jax(monkeypatch):
    monkeypatch.setattr(versions, "nvidia_driver", lambda: "550.54")
    status, text, fix = found_by(versions._jax_triton)["triton and CUDA"]
    assert (status, Path(text).name, fix) == ("ok", "ptxas", "")
    monkeypatch.setattr(triton, "jax_assembler", lambda: None)
    status, text, fix = found_by(versions._jax_triton)["triton and CUDA"]
    assert status == "warning"
    assert text == "JAX finds no `ptxas`, with which it assembles Triton kernels"
    assert "jax[cuda12]" in fix


def test_a_torch_without_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = environment.torch_devices("gpu")
    assert found.status == "warning"
    assert "finds no GPU, but JAX computes on one" in found.text
    assert found.fix.startswith("Install the build of torch for this GPU")
    assert environment.torch_devices("cpu").status == "ok"


def test_jax_on_the_cpu_of_a_machine_with_a_gpu(monkeypatch):
    monkeypatch.setattr(environment, "nvidia_driver", lambda: "550.54")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    status, text, fix = found_by(environment._device_findings)["jax and the GPU"]
    assert (status, text) == ("warning", "this machine has an NVIDIA driver (550.54), and JAX uses the CPU")
    assert "pip install 'jax[cuda12]'" in fix


def test_a_platform_that_jax_does_not_have(monkeypatch):
    def devices():
        raise AssertionError  # as JAX does for a plugin without a device

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    (found,) = environment._device_findings()
    assert found.status == "failure"
    assert found.text == "JAX has no device here, because JAX_PLATFORMS is 'cuda': AssertionError"
    assert found.fix.startswith("Unset JAX_PLATFORMS")


@pytest.mark.parametrize(
    ("variables", "status", "text"),
    [
        ({}, "warning", "JAX reserves 75% of the GPU when it starts; torch has the rest"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".4"}, "ok", "JAX reserves 40% of the GPU when it starts"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "ok", "off: JAX takes memory as it needs it"),
    ],
)
def test_memory_that_jax_reserves(monkeypatch, variables, status, text):
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = found_by(environment.memory)["preallocation"]
    assert found[0] == status
    assert found[1].startswith(text)
    assert bool(found[2]) == (status == "warning")


def test_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    status, text, fix = found_by(environment._threads)["torch and XLA"]
    assert status == "warning"
    assert text.endswith("more threads than cores")
    assert "OMP_NUM_THREADS=" in fix


def test_unwritable_folders(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(file / "triton"))
    monkeypatch.setitem(caches._USES, "jax", (lambda: file / "jax", *caches._USES["jax"][1:]))
    report = jtbridge.doctor(["caches"])
    for name, variable in {"jtbridge": "XDG_CACHE_HOME", "triton": "TRITON_CACHE_DIR", "jax": "_COMPILATION_"}.items():
        found = named(report, name)
        assert found.status == "warning"
        assert "cannot be written to: NotADirectoryError" in found.text
        assert variable in found.fix
    assert report.healthy


def test_a_full_disk(monkeypatch, tmp_path):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caches.tempfile, "NamedTemporaryFile", full)
    assert caches.unwritable_reason(tmp_path / "a" / "b") == "OSError: No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_checking_folders_creates_nothing(tmp_path):
    assert caches.unwritable_reason(tmp_path / "a" / "b") is None
    assert list(tmp_path.iterdir()) == []


MAPS = """\
7f10-7f20 r-xp 00000000 08:01 11   /venv/nvidia/cudnn/lib/libcudnn.so.9
7f20-7f30 r--p 00000000 08:01 11   /venv/nvidia/cudnn/lib/libcudnn.so.9
7f30-7f40 r-xp 00000000 08:01 12   /usr/lib/x86_64/libcudnn.so.8
7f40-7f50 r-xp 00000000 08:01 13   /venv/nvidia/nccl/lib/libnccl.so.2
7f50-7f60 rw-p 00000000 00:00 0
"""


def test_libraries_that_are_loaded_twice():
    found = {finding.name: finding for finding in libraries.loaded_findings(MAPS.splitlines())}
    assert set(found) == {"cudnn", "nccl"}
    assert found["cudnn"].status == "warning"
    assert found["cudnn"].text.startswith("cudnn is loaded 2 times: /usr/lib/x86_64/libcudnn.so.8, /venv/")
    assert "the same version of CUDA" in found["cudnn"].fix
    assert (found["nccl"].status, found["nccl"].text) == ("ok", "/venv/nvidia/nccl/lib/libnccl.so.2")
    (none,) = libraries.loaded_findings([])
    assert none.text.startswith("none")


def test_wheels_of_versions_that_were_not_asked_for():
    required = {
        "torch": [("nvidia-cudnn-cu12", "==9.10.2.21")],
        "jax-cuda12-plugin": [("nvidia-nccl-cu12", ">=2.18.1")],
    }
    found = libraries.wheel_findings({"nvidia-cudnn-cu12": "9.8.0.87", "nvidia-nccl-cu12": "2.27"}, required)
    (finding,) = found
    assert (finding.name, finding.status) == ("nvidia-cudnn-cu12", "warning")
    assert finding.text.endswith("requires ==9.10.2.21, but 9.8.0.87 is installed")
    assert finding.fix == "pip install 'nvidia-cudnn-cu12==9.10.2.21'"
    assert libraries.wheel_findings({}, required)[0].text == "none"


@pytest.mark.parametrize(
    ("version", "specifier", "holds"),
    [
        *(("2.13.0+cpu", s, h) for s, h in ((">=2.11", True), ("==2.13", True), ("<2.13", False), ("!=2.13.0", False))),
        *(
            ("9.10.2.21", s, h)
            for s, h in ((">=9.8,<10.0", True), ("<9.10", False), ("~=9.10.1", True), ("~=9.9.1", False))
        ),
        *(("3.9.1", s, h) for s, h in (("~=3.8", True), ("==3.9.*", True), ("!=3.9.*", False), (">3.9", True))),
        ("0.10.2", "", True),
    ],
)
def test_specifiers(version, specifier, holds):
    assert _requirements.meets(version, specifier) is holds


def test_requirements_with_an_extra(monkeypatch):
    lines = ["a>=1", 'b (<2) ; python_version > "3"', 'c==3 ; extra == "with-cuda"', 'd ; extra == "test"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: lines)
    assert _requirements.requirements_of("x") == [("a", ">=1"), ("b", "<2")]
    assert _requirements.requirements_of("x", "with-cuda")[-1] == ("c", "==3")


def test_the_version_of_the_driver(monkeypatch, tmp_path):
    file = tmp_path / "version"
    monkeypatch.setattr(_machine, "_NVIDIA", file)
    assert _machine.nvidia_driver() is None
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version:"
    )
    assert _machine.nvidia_driver() == "550.54.15"


def test_the_exit_status_of_an_unhealthy_report(tmp_path: Path):
    code = (
        "import importlib.metadata as m, sys, runpy; real = m.version\n"
        "m.version = lambda name: '2.4.0' if name == 'torch' else real(name)\n"
        "sys.argv = ['jtbridge', 'doctor', '--only', 'versions', '--json']\n"
        "runpy.run_module('jtbridge', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout)["healthy"] is False
