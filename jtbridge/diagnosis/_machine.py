"""Facts about the machine that can be read without starting JAX or torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

_NVIDIA = Path("/proc/driver/nvidia/version")


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def nvidia_driver() -> str | None:
    """Return the version of NVIDIA's kernel driver; None without one."""
    try:
        text = _NVIDIA.read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module\s.*?(\d+(?:\.\d+)+)", text)
    return match[1] if match else "unknown"
