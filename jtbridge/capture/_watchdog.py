"""A watchdog that ends runs and traces that loop for ever.

A loop such as ``while np.linalg.norm(x) > tol: x = step(x)`` may never end for example arguments. If it calls torch,
`EffectRecorder` counts its reads of values. If it is only Python and NumPy, no mode sees it, so another thread watches.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import threading
import types
from collections.abc import Callable, Iterator

from jtbridge._compat import raise_in_thread

from .modes.effects import EndlessLoopError

SECONDS = 20.0  # the longest time allowed between two operators of torch
_SAMPLES = 8
_MAX_JOIN_SECONDS = 1.0


class _StillRunningError(BaseException):
    """Ends a run. It is not an `Exception`, which the user's code could catch."""


def _is_at_jump(frame: types.FrameType) -> bool:
    """Return whether the instruction that runs in a frame is a jump, or a comparison before one."""
    code, at = frame.f_code.co_code, frame.f_lasti
    names = [name for i in range(at, len(code), 2) if (name := dis.opname[code[i]]) != "CACHE"]
    return "JUMP" in names[0] or (names[0] == "COMPARE_OP" and "JUMP" in "".join(names[1:2]))


@contextlib.contextmanager
def aborted_if_stuck(operators: Callable[[], int]) -> Iterator[None]:
    """End the block if this thread runs Python code for `SECONDS` without calling an operator of torch.

    Args:
        operators: returns the number of operators called so far.

    Raises:
        EndlessLoopError: the block was ended.
    """
    thread, done, lock = threading.get_ident(), threading.Event(), threading.Lock()
    ended = False

    def watch() -> None:
        nonlocal ended
        called, places = operators(), set()
        samples = 0
        while not done.wait(SECONDS / _SAMPLES):
            frame = sys._current_frames().get(thread)
            if operators() != called or frame is None:
                called, places, samples = operators(), set(), 0
                continue
            # During a long call of a compiled library, all samples show the same place, and the call cannot be ended.
            # All samples of a small loop show its jump back, because there Python lets another thread run.
            places.add((id(frame), frame.f_lasti))
            loops = _is_at_jump(frame)
            samples += 1
            del frame
            if samples >= _SAMPLES and (loops or len(places) > 1):
                with lock:
                    if not done.is_set():
                        ended = True
                        raise_in_thread(thread, _StillRunningError)
                places, samples = set(), 0  # if the code catches the exception, raise it again later

    watcher = threading.Thread(target=watch, name="jtbridge-watchdog", daemon=True)
    with contextlib.suppress(RuntimeError):  # at the end of the process Python starts no threads: then nobody watches
        watcher.start()
    try:
        try:
            yield
        finally:
            with lock:
                done.set()
            if ended:  # if the block ended by itself meanwhile, the exception may arrive only now
                for _ in range(1_000):
                    pass
    except _StillRunningError:
        raise EndlessLoopError(
            f"on example arguments it runs for {SECONDS:.0f} s without calling torch, and may not end for these"
        ) from None
    finally:
        done.set()  # once more: the exception may have arrived just before the first call
        # Python may collect garbage on any thread. It ends a daemon thread at the end of the process, and the process
        # aborts if that thread runs a destructor of C++. The watcher ends at once, unless a destructor waits for a lock
        # of this thread.
        if watcher.is_alive():
            watcher.join(_MAX_JOIN_SECONDS)
