"""State that a user's function reaches: found, compared before and after a run, and put back.

- `_reachable.py` walks from a function to everything that it can read, and compares two such walks.
- `_guard.py` runs a function where it is traced, puts back what it wrote, and refuses it by the name of what it writes.
- `_written_values.py` keeps the values of tensors that are written to.
- `_escaped.py` replaces tensors without values that a function stored while it was traced.
"""

from ._escaped import PoisonTensor, poison_tensor, replace
from ._guard import NO_GUARD, Attempt, GlobalDraws, StateGuard, saving_state_once, start_over
from ._reachable import Change, ReachableState, of_library, same
from ._written_values import WrittenValues

__all__ = [
    "NO_GUARD",
    "Attempt",
    "Change",
    "GlobalDraws",
    "PoisonTensor",
    "ReachableState",
    "StateGuard",
    "WrittenValues",
    "of_library",
    "poison_tensor",
    "replace",
    "same",
    "saving_state_once",
    "start_over",
]
