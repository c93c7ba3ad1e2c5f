"""The backends in the order `auto` prefers them, and the choice between them."""

from __future__ import annotations

import importlib
import pkgutil

import jax

from jtbridge.core.functions import TorchFunction
from jtbridge.core.messages import warn_user
from jtbridge.errors import BackendError, CalledWarning, RandomnessError, TranslationError
from jtbridge.transforms import Jvp, Vjp, unbatched
from jtbridge.translate import untranslatable_reason

from ._base import Backend
from ._status import BackendStatus


def _discovered() -> list[Backend]:
    """Return the `BACKENDS` of the files of this folder whose names have no underscore."""
    package = __name__.rpartition(".")[0]
    found: list[Backend] = []
    for file in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if not file.name.startswith("_"):
            found += importlib.import_module(f"{package}.{file.name}").BACKENDS
    return sorted(found, key=lambda backend: backend.preference)


_BACKENDS = {backend.name: backend for backend in _discovered()}


def statuses(platform: str | None) -> tuple[BackendStatus, ...]:
    """Return the statuses for :func:`jtbridge.backends`."""
    platform = jax.default_backend() if platform is None else platform
    platform = "cuda" if platform == "gpu" else platform
    statuses = []
    for backend in _BACKENDS.values():
        missing = backend.unavailable_reason(platform)
        reason = missing or backend.unpreferred_reason(platform)
        statuses.append(BackendStatus(backend.name, backend.kind, missing is None, reason or ""))
    return tuple(statuses)


def backend_named(name: str) -> Backend:
    """Return the backend with a name, or raise `BackendError` with the known names."""
    if not isinstance(name, str) or name not in _BACKENDS:
        raise BackendError(f"There is no backend `{name}`. Known: auto, {_listing()}.")
    return _BACKENDS[name]


def preferred(platform: str) -> Backend:
    """Return the backend that "auto" prefers on a platform."""
    return next(backend for backend in _BACKENDS.values() if _passed_over_reason(backend, platform) is None)


def _passed_over_reason(backend: Backend, platform: str) -> str | None:
    """Return why "auto" never chooses a backend on a platform; None if it may choose the backend for some functions."""
    return backend.unavailable_reason(platform) or backend.unpreferred_reason(platform)


def portable() -> Backend:
    """Return the backend whose programs run without torch and Triton, on every platform."""
    return next(backend for backend in _BACKENDS.values() if backend.kind == "translate" and not backend.uses_kernels)


def calling() -> Backend:
    """Return the backend whose programs call torch, of several the one that "auto" prefers."""
    return next(backend for backend in _BACKENDS.values() if backend.kind == "call")


def unsupported_reasons(name: str, platform: str, fn: TorchFunction) -> dict[str, str]:
    """Return for "auto" why each backend before the chosen one is not chosen; an empty dict for a named backend."""
    found: dict[str, str] = {}
    for backend in _BACKENDS.values() if name == "auto" else ():
        reason = _passed_over_reason(backend, platform) or backend.unsupported_reason(fn)
        if reason is None:
            break
        found[backend.name] = reason
    return found


def choose_backend(name: str, platform: str, fn: TorchFunction, *, quiet: bool = False, pure: bool = False) -> Backend:
    """Return the backend that runs a function on a platform: the named one, or for "auto" the first that can.

    Unless `quiet`, warn if "auto" chooses a backend that does not translate. With `pure`, a translated program may not
    contain calls of torch.

    Raises:
        BackendError: the named backend cannot run on the platform, or for "auto" no backend can run the function.
        TranslationError: the named backend cannot run the function.
        RandomnessError: `fn` is a derivative that draws random numbers and cannot be translated, but its function can.
    """
    if name != "auto":
        backend = backend_named(name)
        reason = backend.unavailable_reason(platform)
        if reason is not None:
            raise BackendError(
                f'Backend `{name}` cannot run on platform "{platform}": {reason}. Known: {_listing(platform)}.'
            )
        reason = _unsupported_reason(backend, fn, pure)
        if reason is not None:
            raise TranslationError(f"Backend `{name}` was asked for, but {reason}.")
        return backend
    refused = None
    for backend in _BACKENDS.values():
        if _passed_over_reason(backend, platform) is None:
            reason = _unsupported_reason(backend, fn, pure)
            if reason is None:
                if refused is not None and not quiet:
                    _warn_of_call(fn, backend, refused)
                return backend.for_auto()
            refused = reason
    raise BackendError(f'No backend can run `{fn.base.name}` on platform "{platform}": {_listing(platform)}.')


def may_have_islands(platform: str) -> bool:
    """Return whether torch can run operators inside the translated programs of a platform."""
    platform = "cuda" if platform == "gpu" else platform
    return calling().unavailable_reason(platform) is None


def _unsupported_reason(backend: Backend, fn: TorchFunction, pure: bool) -> str | None:
    reason = backend.unsupported_reason(fn)
    if reason is None and pure and backend.kind == "translate":
        reason = untranslatable_reason(fn, pure=True)
    if backend.kind == "translate" and _draws_again(fn):
        return _untranslatable_draws_reason(backend, fn, reason)
    return reason


def _draws_again(fn: TorchFunction) -> bool:
    """Return whether a derivative draws the random numbers of its function once more."""
    fn = unbatched(fn)
    return fn.base.seeded and isinstance(fn, Vjp | Jvp)


def _untranslatable_draws_reason(backend: Backend, fn: TorchFunction, reason: str | None) -> str | None:
    """Return why a derivative that draws random numbers cannot be translated; None if it can.

    The derivative must draw the same numbers as the function, so both are translated or both are called.

    Args:
        backend: a backend that translates.
        fn: the derivative.
        reason: why the derivative alone cannot be translated.

    Raises:
        RandomnessError: the function itself is translated, and the derivative cannot be.
    """
    of_function = backend.unsupported_reason(fn.base)
    if reason is not None and of_function is None:
        remedy = (
            "Torch has no such derivative either."
            if "is not implemented" in reason and "derivative for" in reason
            else 'Torch would draw other numbers for it. Use `backend="dlpack"`, with which torch draws for both.'
        )
        raise RandomnessError(
            f"`{fn.base.name}` draws random numbers and is translated, but a derivative of it cannot be: {reason}. "
            f"{remedy}"
        )
    return of_function or reason


def _warn_of_call(fn: TorchFunction, backend: Backend, refused: str) -> None:
    """Warn, once per wrapped function, that it is called because it cannot be translated."""
    warnings_given = fn.base.warnings_given
    if "called" in warnings_given:
        return
    warnings_given.add("called")
    warn_user(
        f'`{fn.base.name}` is called through backend "{backend.name}", which is slower than a translation: {refused}. '
        f'Choose backend="{backend.name}" to do so without this warning.',
        CalledWarning,
    )


def _listing(platform: str | None = None) -> str:
    return "; ".join(f"{status.name} ({status.reason or 'available'})" for status in statuses(platform))
