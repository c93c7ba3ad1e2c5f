"""A replacement of `is_fake_tensor` in Hugging Face's transformers, for models that are traced."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any


class _FakeAnswers(threading.local):
    """The state of a thread for the replaced `is_fake_tensor`.

    Attributes:
        has_value: returns whether a traced tensor has a known value; None where nothing is traced.
        asked: whether transformers was told that a tensor is fake.
        all_fake: whether every tensor is reported as fake.
    """

    has_value: Callable[[Any], bool] | None = None
    asked = False
    all_fake = False


_HERE = _FakeAnswers()


def show_as_real(has_value: Callable[[Any], bool] | None) -> None:
    """Report traced tensors with known values to transformers as real, on this thread.

    Tried on transformers 5.23. If a mask is fake, a model skips the check of the mask's values and builds the mask; in
    PaliGemma the result differs from that of the check, which would find the mask empty. With known values the model
    can make the check. `is_fake_tensor` of transformers is replaced once; it answers as before on every other thread,
    and when nothing is traced.

    Args:
        has_value: returns whether a tensor's value is known; None where nothing is traced.
    """
    _HERE.has_value = has_value
    if has_value is not None:
        watch_is_fake_tensor()


def watch_is_fake_tensor() -> None:
    """Replace `is_fake_tensor` of transformers, if transformers is imported.

    A trace compares the state that a function reaches before and after, and must not find the replacement. So this
    function is called before the trace.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    if module is not None:
        _replace_is_fake_tensor(module)


def was_answered_fake() -> bool:
    """Return whether `is_fake_tensor` returned True since the last call of this function, and forget it.

    Calls from functions that make masks or only warn do not count: there the answer does not change a model's result.
    """
    asked, _HERE.asked = _HERE.asked, False
    return asked


@contextlib.contextmanager
def treated_as_fake() -> Iterator[None]:
    """Report every tensor to transformers as fake inside the block, on this thread."""
    _HERE.all_fake = True
    try:
        yield
    finally:
        _HERE.all_fake = False


@functools.cache
def _replace_is_fake_tensor(module: Any) -> None:
    original = getattr(module, "is_fake_tensor", None)
    if original is None:
        return

    @functools.wraps(original)
    def is_fake_tensor(x: Any) -> bool:
        if _HERE.all_fake:
            return True
        if not original(x) or (_HERE.has_value is not None and _HERE.has_value(x)):
            return False
        if not _cannot_matter(module.__name__):
            _HERE.asked = True
        return True

    module.is_fake_tensor = is_fake_tensor


def _cannot_matter(asked: str) -> bool:
    """Return whether the caller computes the same whether or not `is_fake_tensor` of the module `asked` is true.

    This holds for `transformers.masking_utils`, and for a function that only warns.
    """
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == asked:
        frame = frame.f_back
    if frame is None:
        return False
    return (
        frame.f_globals.get("__name__") == "transformers.masking_utils"
        or frame.f_code.co_name == "warn_if_padding_and_no_attention_mask"
    )
