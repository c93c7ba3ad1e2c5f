"""Devices, memory and threads, as JAX and torch see them."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence

import jax
import torch

from jtbridge.core.backend_names import ON_DEVICE, ON_HOST
from jtbridge.diagnosis._checks import Check
from jtbridge.diagnosis._child import first_lines
from jtbridge.diagnosis._machine import cores, nvidia_driver
from jtbridge.diagnosis._report import FAILURE, NOTE, OK, WARNING, Finding


def _device_findings() -> Sequence[Finding]:
    platforms = os.environ.get("JAX_PLATFORMS")
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        if not platforms:
            raise
        text = f"JAX has no device here, because JAX_PLATFORMS is {platforms!r}: {first_lines(error)}"
        return [Finding("devices", "jax", FAILURE, text, f"Unset JAX_PLATFORMS, or install JAX for {platforms!r}.")]
    found = collections.Counter(f"{d.platform}, {d.device_kind}" for d in devices)
    text = "; ".join(f"{count} x {name}" for name, count in found.items())
    findings = [Finding("devices", "jax", OK, f"default backend {jax.default_backend()}: {text}")]
    if jax.default_backend() == "cpu" and nvidia_driver() and os.environ.get("JAX_PLATFORMS", "") in ("", "cuda"):
        text = f"this machine has an NVIDIA driver ({nvidia_driver()}), and JAX uses the CPU"
        fix = "pip install 'jax[cuda12]', and see what `python -c \"import jax; jax.devices('cuda')\"` says"
        findings.append(Finding("devices", "jax and the GPU", WARNING, text, fix))
    return [*findings, torch_devices(jax.default_backend())]


def torch_devices(backend: str) -> Finding:
    """Return a finding about torch's access to the devices of JAX's default backend."""
    build = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    build = build if torch.version.hip or torch.version.cuda else "the CPU"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    text = f"built for {build}; " + (f"{count} x {torch.cuda.get_device_name(0)}" if count else "cpu")
    if backend != "gpu" or count:
        return Finding("devices", "torch", OK, text)
    text = f"torch is built for {build} and finds no GPU, but JAX computes on one: functions are translated, or copied "
    text += f"to the host by the backend `{ON_HOST}`; eager calls and the backend `{ON_DEVICE}` do not run on the GPU"
    fix = "Install the build of torch for this GPU: pytorch.org/get-started."
    return Finding("devices", "torch", WARNING, text, fix)


def memory() -> Sequence[Finding]:
    """Return a finding about how JAX and torch share the memory of a GPU."""
    if jax.default_backend() != "gpu":
        return [Finding("memory", "preallocation", OK, "no GPU: nothing is reserved")]
    preallocates = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() not in ("false", "0")
    if not preallocates:
        return [Finding("memory", "preallocation", OK, "off: JAX takes memory as it needs it")]
    fraction = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or os.environ.get("XLA_CLIENT_MEM_FRACTION") or ".75"
    text = f"JAX reserves {float(fraction):.0%} of the GPU when it starts; torch has the rest"
    status = WARNING if float(fraction) > 0.5 else OK
    fix = "XLA_PYTHON_CLIENT_MEM_FRACTION=.5 or XLA_PYTHON_CLIENT_PREALLOCATE=false" if status == WARNING else ""
    return [Finding("memory", "preallocation", status, text, fix)]


def _threads() -> Sequence[Finding]:
    count, threads = cores(), torch.get_num_threads()
    asked = os.environ.get("OMP_NUM_THREADS")
    text = f"{count} cores; torch uses {threads} threads (OMP_NUM_THREADS={asked or 'not set'}), XLA one for each core"
    if threads > count:
        fix = f"Set OMP_NUM_THREADS={count}, or call torch.set_num_threads({count})."
        return [Finding("threads", "torch and XLA", WARNING, f"{text}: more threads than cores", fix)]
    if threads == 1 < count:
        return [Finding("threads", "torch and XLA", NOTE, f"{text}: called functions use one core")]
    return [Finding("threads", "torch and XLA", OK, text)]


CHECKS = (
    Check(
        "devices", "jax and torch", _device_findings, "calls", "See what `import jax; jax.devices()` says in Python."
    ),
    Check("memory", "preallocation", memory, "calls"),
    Check("threads", "torch and XLA", _threads, "calls"),
)
