"""What Hugging Face's transformers ask while a model of theirs is traced."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any


class _FakeAnswers(threading.local):
    """Of this thread: whether a tensor has a value, though it is traced; whether one without was asked for; and whether
    all tensors are to be taken for fake.
    """

    has_value: Callable[[Any], bool] | None = None
    asked = False
    all_fake = False


_HERE = _FakeAnswers()


def show_as_real(has_value: Callable[[Any], bool] | None) -> None:
    """Have transformers not take tensors for fake, on this thread, whose values are known while they are traced.

    Tried on transformers 5.23. A model of theirs skips the check of a mask, and builds it, if the mask is fake; and in
    PaliGemma that gives something else than the check, which would find the mask empty. Where the values are known the
    check can be made. Their `is_fake_tensor` is replaced once; it answers as before on every other thread, and when
    nothing is traced.

    Args:
        has_value: whether a tensor's value is known; None where nothing is traced.
    """
    _HERE.has_value = has_value
    module = sys.modules.get("transformers.utils.import_utils")
    if module is not None and has_value is not None:
        _replace_once(module)


def asked_whether_fake() -> bool:
    """Whether a model of transformers has asked, since the last call of this, and was told that a tensor is fake."""
    asked, _HERE.asked = _HERE.asked, False
    return asked


@contextlib.contextmanager
def taken_for_fake() -> Iterator[None]:
    """Have transformers take every tensor for fake, on this thread."""
    _HERE.all_fake = True
    try:
        yield
    finally:
        _HERE.all_fake = False


@functools.cache
def _replace_once(module: Any) -> None:
    original = getattr(module, "is_fake_tensor", None)
    if original is None:
        return

    @functools.wraps(original)
    def is_fake_tensor(x: Any) -> bool:
        if _HERE.all_fake:
            return True
        if not original(x) or (_HERE.has_value is not None and _HERE.has_value(x)):
            return False
        _HERE.asked = True
        return True

    module.is_fake_tensor = is_fake_tensor
