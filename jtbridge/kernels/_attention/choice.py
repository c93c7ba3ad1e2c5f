"""The choice of the implementation of attention for a program on a GPU: the Triton kernels or cuDNN.

Unless the caller asks for cuDNN, it is chosen only where its kernels are made for the chip and the shape is common.
This rule follows publications of NVIDIA and of the authors of FlashAttention-3 (arXiv:2407.08608) about Hopper.
`make bench-gpu` shows whether the rule is right.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax

from jtbridge._compat import cudnn_attention, cudnn_version
from jtbridge.errors import BackendError
from jtbridge.kernels._chip import Chip, present

from .reference import AttentionSettings

Implementation = Literal["triton", "cudnn"]
IMPLEMENTATIONS = ("triton", "cudnn")

# cuDNN's limits: the largest head size on all supported chips, the lowest compute capability, the oldest version.
_MAX_HEAD_SIZE = 128
_OLDEST_CHIP = 80
_OLDEST_CUDNN = 90000
# cuDNN is preferred on Hopper, whose tensor cores work asynchronously to the threads: cuDNN uses this better than
# Triton 3. Below the preferred length, both implementations take less time than a launch.
_PREFERRED_CHIP = 90
_PREFERRED_HEADS = (64, 128)
_PREFERRED_LENGTH = 512


class Choice(NamedTuple):
    """An implementation of attention, and the reason for its choice."""

    implementation: Literal["triton", "cudnn", "jnp"]
    reason: str


def cudnn_unsupported_reason(
    query: jax.Array, key: jax.Array, settings: AttentionSettings, logsumexp: bool
) -> str | None:
    """Return the reason that cuDNN cannot compute this attention on any chip; None if it can."""
    d, q_len, kv_len = query.shape[-1], query.shape[2], key.shape[2]
    causal = settings.right == 0
    if query.dtype.name not in ("bfloat16", "float16"):
        return f"cuDNN takes bfloat16 and float16, not {query.dtype}"
    if d % 8 or d > _MAX_HEAD_SIZE:
        return f"cuDNN takes heads of a multiple of 8 up to {_MAX_HEAD_SIZE}, not {d}"
    if settings.mask != "none":
        return "a query for which the mask leaves no key would not get 0 with cuDNN"
    if settings.dropout_rate:
        return "cuDNN draws other random numbers than jtbridge does elsewhere"
    if logsumexp:
        return "cuDNN has no gradient of the logarithm that `return_logsumexp` asks for"
    if settings.right not in (None, 0) or (settings.left is not None and not causal):
        return "cuDNN supports a `window` only if it looks back: `is_causal=True` or `window=(n, 0)`"
    if causal and q_len != kv_len:
        return f"causal attention with cuDNN needs queries and keys of equal length, not {q_len} and {kv_len}"
    if not settings.scale > 0:
        return f"cuDNN takes a `scale` over 0, not {settings.scale}"
    return None


def cudnn_unavailable_reason(chip: Chip | None) -> str | None:
    """Return the reason that cuDNN cannot be used in this process; None if it can.

    If `chip` is None, because this process has no GPU, neither the chip nor the version of cuDNN is checked.
    """
    try:
        cudnn_attention()
    except (ImportError, AttributeError) as error:
        return str(error)
    if chip is None:
        return None
    if chip.capability is None or chip.capability < _OLDEST_CHIP:
        return f"cuDNN needs an NVIDIA GPU of compute capability 8.0 or more, this is {chip.name}"
    version = cudnn_version()
    if version is None or version < _OLDEST_CUDNN:
        return f"JAX finds no cuDNN of {_OLDEST_CUDNN} or more, but {version}"
    return None


def decided(
    query: jax.Array, key: jax.Array, settings: AttentionSettings, implementation: Implementation | None
) -> Choice:
    """Return the implementation for this process's chip, for attention that the kernels and cuDNN can both compute.

    Raises:
        BackendError: cuDNN is asked for and cannot be used in this process.
    """
    chip = present()
    missing = cudnn_unavailable_reason(chip)
    if implementation == "cudnn":
        if missing:
            raise BackendError(f'attention with `implementation="cudnn"`: {missing}')
        return Choice("cudnn", "it is asked for")
    if implementation == "triton":
        return Choice("triton", "it is asked for")
    if missing:
        return Choice("triton", missing)
    return Choice("triton", reason) if (reason := _not_preferred_reason(query, key, settings, chip)) else _PREFERRED


_PREFERRED = Choice("cudnn", "made for Hopper: heads of 64 or 128, equal lengths, no option that cuDNN lacks")


def _not_preferred_reason(
    query: jax.Array, key: jax.Array, settings: AttentionSettings, chip: Chip | None
) -> str | None:
    if chip is None or chip.capability != _PREFERRED_CHIP:
        return "cuDNN is preferred on compute capability 9.0 alone"
    if query.shape[-1] not in _PREFERRED_HEADS:
        return f"cuDNN is preferred for heads of 64 and 128, not {query.shape[-1]}"
    if settings.left is not None:
        return "the kernels skip what is outside a window"
    length = min(query.shape[2], key.shape[2])
    if length < _PREFERRED_LENGTH or query.shape[2] != key.shape[2]:
        return f"cuDNN is preferred between equal lengths of {_PREFERRED_LENGTH} or more"
    return None
