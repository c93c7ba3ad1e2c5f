"""The backends of jtbridge on JAX's default platform."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jtbridge._backends import backends
from jtbridge.diagnosis._checks import Check
from jtbridge.diagnosis._report import NOTE, OK, Finding

_GROUP = "backends"


def _backend_findings() -> Sequence[Finding]:
    platform = jax.devices()[0].platform
    return [
        Finding(_GROUP, status.name, NOTE if status.reason else OK, status.reason or f"runs on {platform}")
        for status in backends()
    ]


CHECKS = (Check(_GROUP, "availability", _backend_findings, "calls"),)
