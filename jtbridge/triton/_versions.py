"""The installed versions of Triton and jax-triton, and whether they work together."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import os
import re
from typing import Any

from jtbridge.core.messages import summary_of


@functools.cache
def unsupported_reason(platform: str = "cuda") -> str | None:
    """Return why no Triton kernel can be compiled for a platform, or None if it can.

    Args:
        platform: "rocm", or any other name for an NVIDIA GPU.
    """
    for module, package in (("triton", "triton"), ("jax_triton", "jax-triton")):
        if importlib.util.find_spec(module) is None:
            return f"`{package}` is not installed"
    try:
        import_jax_triton()
    except Exception as error:  # noqa: BLE001  (a broken installation must not break the other backends)
        return f"jax-triton cannot be imported: {summary_of(error)}"
    return _mismatch_reason() or (_amd_mismatch_reason() if platform == "rocm" else None)


def _mismatch_reason() -> str | None:
    """Return why the installed versions do not work together: jax-triton 0.4 finds no NVIDIA backend in Triton 3.6."""
    triton, jax_triton = _installed_versions()
    if not passes_aliases_twice() and _major_minor(triton) < (3, 7):
        return (
            f"jax-triton {jax_triton} needs Triton 3.7 or newer, but Triton {triton} is installed. "
            "Upgrade Triton, or install jax-triton 0.3.1"
        )
    return None


def _amd_mismatch_reason() -> str | None:
    """Return why the installed versions cannot compile for AMD.

    For AMD, Triton from 3.7 on reads `num_ctas`, the number of blocks of a cluster, and jax-triton up to 0.4.1 does not
    pass it. Tried by lowering with Triton 3.6 to 3.9, on a machine without a GPU.
    """
    triton, jax_triton = _installed_versions()
    passes_it = "num_ctas" in import_jax_triton().triton_lib.compile_ttir_to_hsaco_inplace.__code__.co_consts
    if passes_it or _major_minor(triton) < (3, 7):
        return None
    return (
        f"jax-triton {jax_triton} cannot compile for AMD with Triton {triton}. Install Triton 3.6 with jax-triton 0.3.1"
    )


def _installed_versions() -> tuple[str, str]:
    return importlib.metadata.version("triton"), importlib.metadata.version("jax-triton")


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


@functools.cache
def passes_aliases_twice() -> bool:
    """Return whether a kernel gets two pointers for an operand that a result aliases, as up to jax-triton 0.3."""
    return "out_type" not in inspect.signature(import_jax_triton().triton_call).parameters


def import_jax_triton() -> Any:
    """Import jax-triton, and restore ``TRITON_CACHE_DIR``, which the import of 0.3.1 sets to an empty string."""
    before = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton
    finally:
        os.environ.pop("TRITON_CACHE_DIR", None)
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before
    return jax_triton


def compute_capability() -> int:
    """Return the compute capability of the first GPU from jax-triton (tried: 0.3.1), such as 90 for 9.0."""
    return import_jax_triton().triton_lib.triton_kernel_call_lib.get_compute_capability(0)
