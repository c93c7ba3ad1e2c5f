"""Chains are fused where a GPU has kernels for them. Here they are fused on a CPU, and `xla` lowers them to jnp."""

from __future__ import annotations

import pytest

from jtbridge.calls.traced import _call


@pytest.fixture(autouse=True)
def chains_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_call, "uses_kernels", lambda backend: True)
