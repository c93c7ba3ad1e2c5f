"""Snapshots of the mutable state that a function reaches, taken before the function is traced.

Tracing runs a function on tensors without values. Python code in the function that counts calls, appends to a list,
advances an iterator or assigns an attribute really runs then. :class:`ReachableState` saves the state that the function
could change, names the changes afterwards with a readable path such as ``self.calls``, and restores the state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from jtbridge._compat import hidden_from_modes, innermost, storage_id, writes

from ._comparison import DEPTH, MISSING, holds_traced, same, same_tensors
from ._iterators import position_of
from ._kinds import ALL_GLOBALS, DENSE_TENSOR, GLOBALS, SMALL_TENSOR, TENSOR
from ._records import IteratorPosition, Record, StatePath
from ._walk import StateWalk

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # types of tensors whose values can be compared


class Change(NamedTuple):
    """One change of state: where it is, and its values before and after."""

    path: StatePath
    before: Any
    after: Any

    @property
    def depends_on_arguments(self) -> bool:
        """Return whether the new value holds a tensor of the trace that depends on the arguments."""
        return holds_traced(self.after, DEPTH)

    @property
    def adds_array(self) -> bool:
        """Return whether there was nothing, or None, where a tensor or an array is now."""
        return (self.before is MISSING or self.before is None) and isinstance(self.after, torch.Tensor | np.ndarray)

    @property
    def is_of_tensor(self) -> bool:
        """Return whether a tensor was written to, replaced or removed. Small tensors may be saved as bytes."""
        written = isinstance(self.before, bytes) and isinstance(self.after, torch.Tensor)
        return written or isinstance(self.before, torch.Tensor)

    @property
    def removes(self) -> bool:
        """Return whether there is nothing, or None, now."""
        return self.after is MISSING or self.after is None

    @property
    def is_form_of_constant(self) -> bool:
        """Return whether a tensor was replaced by another form of it, as a derivative makes it.

        The new tensor has the same values and an autograd graph, or it escaped from a transform of `torch.func`.
        """
        if type(self.before) not in _PLAIN or type(self.after) not in _PLAIN:
            return False
        if self.before.shape != self.after.shape or self.before.dtype != self.after.dtype:
            return False
        if innermost(self.after) is not self.after:
            return True
        return same_tensors(self.before.detach(), self.after.detach())

    def __str__(self) -> str:
        return f"{'global ' if self.path.is_global else ''}`{self.path}`"


class ReachableState:
    """Snapshot of the state that some objects reach.

    Args:
        roots: the objects to start from, each with its name: the function, without a name, and its static arguments.

    Attributes:
        may_draw: whether the reached code names the global generator of Python or NumPy.
        names: the names of globals and attributes in the reached code.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]]):
        self._saved = StateWalk(roots)
        self.may_draw = self._saved.may_draw
        self.names = self._saved.names

    def differences(self) -> list[Change]:
        """Return the changes of the state since the snapshot."""
        found = []
        with hidden_from_modes():
            for record in self._all_records():
                for step, key, before, after in record.differences():
                    is_global = record.kind in (GLOBALS, ALL_GLOBALS)
                    parent = record.path
                    if is_global:
                        place = StatePath(None, "global", key)
                    else:
                        place = StatePath(parent, step, key) if step else parent
                    found.append(Change(place, before, after))
            found += [Change(found_.path, found_.position, found_.iterator) for found_ in self._advanced()]
        return found

    def changed_part(self) -> ReachableState:
        """Return the part of the snapshot whose state has changed since."""
        part = ReachableState(())
        with hidden_from_modes():
            part._saved.records = [record for record in self._all_records() if record.is_changed()]
            part._saved.positions = self._advanced()
        return part

    def tensors(self) -> Iterator[tuple[torch.Tensor, StatePath]]:
        """Return the tensors in the snapshot, each with its path."""
        kinds = (TENSOR, SMALL_TENSOR, DENSE_TENSOR)
        return ((record.obj, record.path) for record in self._saved.records if record.kind in kinds)

    def save_values(self, tensor: torch.Tensor) -> None:
        """Save the values of the large tensors that share the memory of `tensor`, before code may write to it."""
        records, storage = self._saved.records, storage_id(tensor)
        for i, record in enumerate(records):
            if record.kind is TENSOR and record.obj.layout is torch.strided and storage_id(record.obj) == storage:
                with hidden_from_modes():
                    contents = *record.contents, record.obj.detach().clone()
                records[i] = record._replace(kind=SMALL_TENSOR, contents=contents)

    def restore(self) -> None:
        """Restore the state, except Python generators that were advanced and iterators that cannot be copied.

        If there is something to restore, functions with a ``functools.cache`` drop the results that they stored since.
        """
        with hidden_from_modes():
            fresh = {id(found.iterator): found.copy for found in self._advanced() if found.copy is not None}
            # The gradient of a tensor is restored before the tensor, whose dtype it must have.
            contents = [*self._records_of_contents()]
            is_changed = bool(fresh)
            for record in [*self._changed_classes_and_dicts(), *reversed(contents)]:
                wanted = _with_fresh_iterators(record.contents, fresh) if fresh else record.contents
                if wanted is not record.contents or record.is_changed():
                    record.kind.write(record.obj, wanted)
                    is_changed = True
            if is_changed:
                self.drop_new_results()
            else:
                self.drop_traced_results()

    def new_containers(self) -> list[str]:
        """Return the names of functions whose ``functools.cache`` has new results that later calls may write to."""
        return [cache.name for cache in self._saved.caches if cache.has_new_containers()]

    def drop_new_results(self) -> None:
        """Drop the results that functions with a ``functools.cache`` stored since the snapshot."""
        for cache in self._saved.caches:
            cache.drop_new()

    def drop_traced_results(self) -> list[str]:
        """Drop the results with tensors of a trace that functions with a ``functools.cache`` stored since the snapshot.

        Return the names of the functions whose dropped results later calls would have got.
        """
        return [cache.name for cache in self._saved.caches if cache.drop_traced()]

    def without_shape(self) -> list[StatePath]:
        """Return the places of parameters and buffers of lazy modules, which get a shape in their first call."""
        return self._saved.without_shape

    def escaped(self) -> list[StatePath]:
        """Return the places where the snapshot has tensors that escaped from a transform of `torch.func`."""
        return self._saved.escaped

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the saved state inside the block, and the present state after the block."""
        now = self.changed_part()
        with hidden_from_modes():
            now._saved.records = [r._replace(contents=r.kind.read(r.obj)) for r in now._saved.records]
        now._saved.positions = []
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def has_written_large_tensors(self) -> bool:
        """Return whether torch wrote to a tensor since the snapshot whose values are not saved."""
        with hidden_from_modes():
            return any(writes(tensor) != version for tensor, version in self._saved.versions)

    def restore_derived(self) -> None:
        """Restore the module attributes that torch computes in each call: derived weights, lists of RNN weights."""
        for attributes, name, value in self._saved.derived:
            attributes[name] = value

    def _all_records(self) -> Iterator[Record]:
        # Classes are restored first, because the contents of an object may depend on its class.
        yield from self._changed_classes_and_dicts()
        yield from self._records_of_contents()

    def _changed_classes_and_dicts(self) -> Iterator[Record]:
        for each in self._saved.objects:
            yield from each.changed()

    def _records_of_contents(self) -> Iterator[Record]:
        yield from self._saved.records
        for empty in self._saved.empty:
            if any(empty.containers):
                yield from empty.filled()

    def _advanced(self) -> list[IteratorPosition]:
        return [known for known in self._saved.positions if not same(known.position, position_of(known.iterator))]


def _with_fresh_iterators(contents: Any, fresh: dict[int, Any]) -> Any:
    """Return the contents of an object with fresh iterators in place of advanced ones."""
    if isinstance(contents, dict) and any(id(value) in fresh for value in contents.values()):
        return {key: fresh.get(id(value), value) for key, value in contents.items()}
    if isinstance(contents, list) and any(id(value) in fresh for value in contents):
        return [fresh.get(id(value), value) for value in contents]
    return fresh.get(id(contents), contents)
