"""Settings that hold for a block of code: :func:`jtbridge.config`."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from pathlib import Path

from jtbridge._backends import check_name
from jtbridge.core import tuning
from jtbridge.core.context_variables import assigned
from jtbridge.errors import ArgumentError

_VERIFY: contextvars.ContextVar[bool | None] = contextvars.ContextVar("jtbridge_verify", default=None)
_ISLANDS: contextvars.ContextVar[str | None] = contextvars.ContextVar("jtbridge_islands", default=None)
_BACKEND: contextvars.ContextVar[str | None] = contextvars.ContextVar("jtbridge_backend", default=None)


@contextlib.contextmanager
def config(
    *,
    backend: str | None = None,
    islands: str | None = None,
    verify: bool | None = None,
    tune: bool | None = None,
    tuning_folder: str | os.PathLike[str] | None = None,
) -> Iterator[None]:
    """Set options for calls and traces inside the block. A program that was compiled before keeps its own options.

    Islands are the exception: a program that was compiled before its islands were tuned is compiled again.

    Args:
        backend: "auto" or a name of :func:`jtbridge.backends`, for every wrapped function. It overrides the
            ``backend=`` of :func:`jtbridge.wrap`.
        islands: "auto", "needed" or "never", for every wrapped function: which operators torch runs inside translated
            programs. It overrides the ``islands=`` of :func:`jtbridge.wrap`.
        verify: whether the first result of every traced program is compared with torch's. It overrides the
            ``verify=`` of :func:`jtbridge.wrap`, which describes the comparison.
        tune: whether islands and the Triton kernels of :mod:`jtbridge.kernels` are tuned. The results are used from
            then on, in later processes too. When a program with ``islands="auto"`` is lowered for one CPU device, each
            operator that torch may run faster than XLA is timed in both, at its shapes and on random operands, and the
            faster one runs it. This takes some tenths of a second for each operator and shape. When a program is
            lowered for a GPU, each kernel is timed in a few configurations, on torch's stream and in torch's memory,
            and the fastest is used. This takes seconds for each kernel and size. A program of several processes does
            not tune; it uses earlier results.
        tuning_folder: the folder of the results; ``$XDG_CACHE_HOME/jtbridge/tuning`` if it is not given.

    Raises:
        BackendError: `backend` is not the name of a backend; the message lists the known names.
        ArgumentError: `islands` is not one of its three values, `verify` or `tune` is not True or False, or
            `tuning_folder` is not a path.

    Example:
        >>> import jax.numpy as jnp, jtbridge, torch
        >>> f = jtbridge.wrap(torch.sin)
        >>> with jtbridge.config(backend="callback"):
        ...     y = f(jnp.zeros(3))
    """
    for name, flag in (("verify", verify), ("tune", tune)):
        if not isinstance(flag, bool | None):
            raise ArgumentError(f"`{name}` must be True or False, but it is {flag!r}.")
    if tuning_folder == "" or not isinstance(tuning_folder, str | os.PathLike | None):
        raise ArgumentError(f"`tuning_folder` must be the path of a folder, but it is {tuning_folder!r}.")
    folder = None if tuning_folder is None else _as_path(tuning_folder)
    values = (
        (_ISLANDS, _ISLANDS.get() if islands is None else check_islands(islands)),
        (_BACKEND, _BACKEND.get() if backend is None else check_name(backend)),
        (_VERIFY, _VERIFY.get() if verify is None else verify),
    )
    with assigned(*values), tuning.settings(tune, folder):
        yield


def backend_or(default: str) -> str:
    """Return the backend of the enclosing :func:`config` block, else `default`."""
    return _BACKEND.get() or default


def islands_or(default: str) -> str:
    """Return the ``islands`` option of the enclosing :func:`config` block, else `default`."""
    return _ISLANDS.get() or default


def check_islands(value: str) -> str:
    """Return `value` if it is one of the three values of ``islands=``."""
    if value not in ("auto", "needed", "never"):
        raise ArgumentError(f"`islands` must be one of 'auto', 'needed', 'never', but it is {value!r}.")
    return value


def verify_or(default: bool) -> bool:
    """Return the ``verify`` option of the enclosing :func:`config` block, else `default`."""
    found = _VERIFY.get()
    return default if found is None else found


def _as_path(folder: str | os.PathLike[str]) -> Path:
    try:
        path = Path(folder).expanduser().absolute()
        if "\0" in str(path):
            raise ValueError("a path has no null characters")
    except (RuntimeError, TypeError, ValueError) as error:  # such as for a user that does not exist
        raise ArgumentError(f"`tuning_folder` must be the path of a folder, but it is {folder!r}: {error}.") from None
    return path
