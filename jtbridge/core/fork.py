"""Processes that were forked from one that uses JAX: JAX's threads do not exist there, so calls of JAX would hang."""

from __future__ import annotations

import os

from jtbridge._compat import jax_is_initialized
from jtbridge.errors import ForkError

_FORKED = False


def check_not_forked(name: str) -> None:
    """Raise a `ForkError` in a process that was forked from one that uses JAX.

    Args:
        name: the function that is about to be called.
    """
    if _FORKED:
        raise ForkError(
            f"`{name}` is called in a process that was forked from one that uses JAX. JAX's threads do not exist here, "
            "so the call could wait for ever. Start processes that use JAX by "
            '`multiprocessing.get_context("spawn")`; a torch DataLoader takes `multiprocessing_context="spawn"`.'
        )


def _after_fork() -> None:
    global _FORKED
    _FORKED = _FORKED or jax_is_initialized()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_after_fork)
