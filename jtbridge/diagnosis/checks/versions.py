"""The versions of the packages, and whether they fit together. Most of these checks only read metadata."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Sequence

from jtbridge.core.backend_names import WITH_KERNELS
from jtbridge.core.version import __version__
from jtbridge.diagnosis._checks import Check
from jtbridge.diagnosis._machine import nvidia_driver
from jtbridge.diagnosis._report import FAILURE, NOTE, OK, WARNING, Finding
from jtbridge.diagnosis._requirements import meets, release, requirements_of, version_of

_GROUP = "versions"
_NEEDED = {"jax": ">=0.10", "jaxlib": ">=0.10", "torch": ">=2.11", "numpy": ">=2.0"}
_OPTIONAL = {
    "triton": (">=3.6", f"Triton kernels, and the `{WITH_KERNELS}` backend on a GPU"),
    "jax-triton": (">=0.3.1", "Triton kernels on a GPU"),
}
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "jax-rocm60-plugin")


def _python() -> Sequence[Finding]:
    version = platform.python_version()
    if meets(version, ">=3.11"):
        return [Finding(_GROUP, "python", OK, version)]
    return [Finding(_GROUP, "python", FAILURE, f"{version} is older than 3.11", "Use Python 3.11 or newer.")]


def _packages() -> Sequence[Finding]:
    found = [_needed(name, specifier) for name, specifier in _NEEDED.items()]
    return found + [_optional(name, *wanted) for name, wanted in _OPTIONAL.items()]


def _needed(name: str, specifier: str) -> Finding:
    version = version_of(name)
    install = f"pip install '{name}{specifier}'"
    if version is None:
        return Finding(_GROUP, name, FAILURE, "it has no metadata: it is not installed by pip", install)
    if not meets(version, specifier):
        return Finding(_GROUP, name, FAILURE, f"{version} is not {specifier}", install)
    return Finding(_GROUP, name, OK, version)


def _optional(name: str, specifier: str, purpose: str) -> Finding:
    version = version_of(name)
    module = name.replace("-", "_")
    install = f"pip install '{name}{specifier}'"
    if version is None or importlib.util.find_spec(module) is None:
        status = WARNING if nvidia_driver() else NOTE
        return Finding(_GROUP, name, status, f"it is not installed, and needed for: {purpose}", install)
    if not meets(version, specifier):
        return Finding(_GROUP, name, WARNING, f"{version} is not {specifier}; no kernel runs on a GPU", install)
    return Finding(_GROUP, name, OK, version)


def _jax_and_jaxlib() -> Sequence[Finding]:
    jax, jaxlib = version_of("jax"), version_of("jaxlib")
    if jax is None or jaxlib is None:
        return []
    found = []
    for name, specifier in requirements_of("jax"):
        if name == "jaxlib" and not meets(jaxlib, specifier):
            text = f"jax {jax} requires jaxlib {specifier}, but {jaxlib} is installed"
            found.append(Finding(_GROUP, "jax and jaxlib", FAILURE, text, f"pip install 'jax=={jax}' 'jaxlib=={jax}'"))
    return found


def _plugin() -> Sequence[Finding]:
    """Check the versions of JAX's plugins. JAX loads only plugins of its own version."""
    jaxlib = version_of("jaxlib") or ""
    found = []
    for name in _PLUGINS:
        version = version_of(name)
        if version is None:
            continue
        if release(version)[:3] != release(jaxlib)[:3]:
            text = f"{version} is not of the version of jaxlib, {jaxlib}: JAX does not load it"
            found.append(Finding(_GROUP, name, WARNING, text, f"pip install '{name}=={jaxlib}'"))
        else:
            found.append(Finding(_GROUP, name, OK, version))
    if nvidia_driver() and not any(version_of(name) for name in _PLUGINS if "cuda" in name):
        text = "this machine has an NVIDIA GPU, and JAX's plugin for it is not installed: JAX computes on the CPU"
        found.append(Finding(_GROUP, "jax-cuda12-plugin", WARNING, text, "pip install 'jax[cuda12]'"))
    return found


def _jax_triton() -> Sequence[Finding]:
    """Check that Triton and jax-triton can be imported, and that their versions work together.

    Also look for the assembler that JAX runs for Triton kernels: without it, no kernel runs on an NVIDIA GPU.
    """
    from jtbridge.triton import jax_assembler, unsupported_reason

    if any(version_of(name) is None for name in ("triton", "jax-triton")):
        return []  # the check "packages" reports this
    found = []
    reason = unsupported_reason()
    if reason is not None:
        found.append(Finding(_GROUP, "jax-triton and triton", WARNING, reason, _fix_of(reason)))
    else:
        found.append(Finding(_GROUP, "jax-triton and triton", OK, "they can be imported and fit together"))
    if reason is None and any(version_of(name) for name in _PLUGINS if "cuda" in name):
        assembler = jax_assembler()
        status = OK if assembler else WARNING if nvidia_driver() else NOTE
        text = str(assembler) if assembler else "JAX finds no `ptxas`, with which it assembles Triton kernels"
        found.append(Finding(_GROUP, "triton and CUDA", status, text, "" if assembler else "pip install 'jax[cuda12]'"))
    return found


def _fix_of(reason: str) -> str:
    plugin = version_of("jax-cuda12-plugin") or version_of("jax-cuda13-plugin")
    if "cannot be imported" in reason and plugin is None and meets(version_of("jax-triton") or "", "<0.4"):
        jaxlib = version_of("jaxlib")
        return f"jax-triton 0.3 needs JAX's CUDA plugin: pip install --no-deps jax-cuda12-plugin=={jaxlib}"
    return "Install jax-triton 0.3.1 with Triton 3.6, or jax-triton 0.4.1 with Triton 3.7."


def _torch_float16() -> Sequence[Finding]:
    version = version_of("torch")
    if version is None or release(version)[:2] != (2, 14):
        return []
    text = f"torch {version} computes some float16 products on a CPU wrongly; `arithmetic` below tries some"
    return [Finding(_GROUP, "torch, float16", WARNING, text, "Use another version of torch, or bfloat16 or float32.")]


CHECKS = (
    Check(_GROUP, "python", _python),
    Check(_GROUP, "jtbridge", lambda: [Finding(_GROUP, "jtbridge", OK, __version__)]),
    Check(_GROUP, "packages", _packages),
    Check(_GROUP, "jax and jaxlib", _jax_and_jaxlib),
    Check(_GROUP, "plugins", _plugin),
    Check(_GROUP, "jax-triton and triton", _jax_triton, "calls", "Reinstall jax-triton and triton."),
    Check(_GROUP, "torch", _torch_float16),
)
