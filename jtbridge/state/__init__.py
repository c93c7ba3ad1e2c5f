"""State that a user's function reaches: how it is found, compared before and after a run, and restored.

- `_reachable.py` saves the state that a function reaches, compares it with the present state, and restores it.
- `_walk.py` walks from a function to everything that the function can read; `_records.py` has the saved entries.
- `_kinds.py` reads, writes and compares one object of each kind, and `_iterators.py` the position of an iterator.
- `_comparison.py` compares values, and finds tensors of a trace in them.
- `_guard.py` runs a function for a trace, restores the state that it wrote, and raises an error that names this state.
- `_before_run.py` saves the state before a run that may be undone, and `_global_draws.py` finds draws from the global
  generators of Python and NumPy.
- `_written_values.py` saves and restores the values of tensors that operators write to.
- `_escaped.py` replaces fake tensors that a function stored while it was traced, and `_caches.py` drops results with
  such tensors from the caches of `functools`.
"""

from ._before_run import StateBeforeRun
from ._comparison import VALUES, same, same_results, same_tensors
from ._escaped import PoisonTensor, poison_tensor, replace
from ._global_draws import GlobalDraws
from ._guard import NO_GUARD, StateGuard, restore_before_next_attempt, save_values, saving_state_once
from ._kinds import of_library
from ._reachable import Change, ReachableState
from ._written_values import WrittenValues
