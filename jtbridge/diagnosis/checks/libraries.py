"""The CUDA libraries that JAX and torch load into one process, and the wheels that they come from."""

from __future__ import annotations

import collections
import importlib.metadata
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from jtbridge.diagnosis._checks import Check
from jtbridge.diagnosis._report import OK, WARNING, Finding
from jtbridge.diagnosis._requirements import meets, requirements_of, version_of

_GROUP = "libraries"
_LIBRARY = re.compile(r"^lib(cudart|cublas|cublasLt|cudnn|nccl|cufft|cusolver|cusparse|nvJitLink|nvrtc|cupti)\.so")
_REQUIRING = (("torch", ""), ("jax-cuda12-plugin", "with-cuda"), ("jax-cuda13-plugin", "with-cuda"))


def _wheels() -> Sequence[Finding]:
    installed = ((d.metadata["Name"] or "", d.version) for d in importlib.metadata.distributions())
    return wheel_findings(
        {name: version for name, version in installed if name.startswith("nvidia-")},
        {package: requirements_of(package, extra) for package, extra in _REQUIRING},
    )


def wheel_findings(
    installed: Mapping[str, str], requirements: Mapping[str, Iterable[tuple[str, str]]]
) -> Sequence[Finding]:
    """Return findings about NVIDIA's wheels: a warning for each whose version JAX or torch does not allow.

    Args:
        installed: the versions of NVIDIA's wheels by name.
        requirements: the names and specifiers that packages require.
    """
    if not installed:
        return [Finding(_GROUP, "NVIDIA's wheels", OK, "none")]
    found = []
    for package, wanted in requirements.items():
        for name, specifier in wanted:
            version = installed.get(name)
            if version is not None and not meets(version, specifier):
                text = f"{package} {version_of(package)} requires {specifier}, but {version} is installed"
                found.append(Finding(_GROUP, name, WARNING, text, f"pip install '{name}{specifier}'"))
    listed = ", ".join(f"{name} {version}" for name, version in sorted(installed.items()))
    return found or [Finding(_GROUP, "NVIDIA's wheels", OK, listed)]


def _loaded_libraries() -> Sequence[Finding]:
    import jax
    import torch

    jax.block_until_ready(jax.numpy.ones(2) + 1)
    if torch.cuda.is_available():
        torch.ones(2, device="cuda").sum().item()
    maps = Path("/proc/self/maps")
    return loaded_findings(maps.read_text().splitlines() if maps.exists() else [])


def loaded_findings(lines: Iterable[str]) -> Sequence[Finding]:
    """Return findings about the CUDA libraries in ``/proc/self/maps``: a warning for each that is loaded twice."""
    paths: dict[str, set[str]] = collections.defaultdict(set)
    for line in lines:
        path = line.split(maxsplit=5)[-1] if line.count("/") else ""
        match = _LIBRARY.match(Path(path).name)
        if match:
            paths[match[1]].add(path)
    if not paths:
        return [Finding(_GROUP, "loaded", OK, "none: neither JAX nor torch loads CUDA libraries here")]
    found = []
    for name, places in sorted(paths.items()):
        if len(places) > 1:
            text = f"{name} is loaded {len(places)} times: {', '.join(sorted(places))}"
            fix = "Install JAX and torch for the same version of CUDA, and remove others from LD_LIBRARY_PATH."
            found.append(Finding(_GROUP, name, WARNING, text, fix))
        else:
            found.append(Finding(_GROUP, name, OK, next(iter(places))))
    return found


def _both_compute(order: str) -> Sequence[Finding]:
    import jax
    import torch

    versions = f"jax {jax.__version__}, torch {torch.__version__}"
    total = float(jax.numpy.ones(2).sum()) + float(torch.ones(2).sum())
    assert total == 4.0
    return [Finding(_GROUP, f"import {order}", OK, f"{versions}: both compute")]


_FIX = "Compare the CUDA versions of the builds of jax and torch; try the other order of imports."
CHECKS = (
    Check(_GROUP, "wheels", _wheels),
    Check(_GROUP, "import torch, then jax", lambda: _both_compute("torch, then jax"), "calls", _FIX),
    Check(_GROUP, "import jax, then torch", lambda: _both_compute("jax, then torch"), "programs", _FIX),
    Check(_GROUP, "loaded", _loaded_libraries, "calls", _FIX),
)
