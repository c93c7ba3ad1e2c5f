"""Read and compare the positions of iterators."""

from __future__ import annotations

import collections
import csv
import gc
import io
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jtbridge._compat import LoaderIterator, batches_taken

_ITERTOOLS = (
    *("accumulate", "batched", "chain", "combinations", "combinations_with_replacement", "compress", "count", "cycle"),
    *("dropwhile", "filterfalse", "groupby", "islice", "pairwise", "permutations", "product", "repeat", "starmap"),
    *("takewhile", "zip_longest"),
)
# Iterators that have a position and cannot be copied. The position of a `StringIO` or `BytesIO` is the number of
# characters or bytes that are left to read: reading changes this number, and writing at the end does not.
_WITH_POSITION: dict[type, Callable[[Any], Any]] = {
    type(csv.reader(())): lambda reader: reader.line_num,
    np.flatiter: lambda flat: flat.index,
    np.ndenumerate: lambda pairs: pairs.iter.index,
    LoaderIterator: batches_taken,
    io.StringIO: lambda text: None if text.closed else len(text.getvalue()) - text.tell(),
    io.BytesIO: lambda text: None if text.closed else text.getbuffer().nbytes - text.tell(),
}
ITERATORS = (
    *_WITH_POSITION,
    type(iter(np.zeros(1))),
    *(type(iter(made)) for made in ([], (), "", "é", b"", bytearray(), set(), range(0), range(1 << 70))),
    *(type(iter(made)) for made in ({}, {}.values(), {}.items(), collections.deque(), collections.OrderedDict())),
    *(type(reversed(made)) for made in ([], {}, {}.values(), {}.items(), ())),  # type: ignore[call-overload]
    *(enumerate, zip, map, filter, type(iter(input, None)), type(itertools.tee(())[0])),
    *(getattr(itertools, name) for name in _ITERTOOLS if hasattr(itertools, name)),
)


def position_of(iterator: Any) -> Any:
    """Return a value that differs once an iterator has advanced; None if there is no such value."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return () if frame is None else (frame.f_lasti, tuple(frame.f_locals.values()))
    for type_, tell in _WITH_POSITION.items():
        if isinstance(iterator, type_):
            return (tell(iterator),)
    try:
        reduced = iterator.__reduce__()
    except (TypeError, Warning):  # iterators of itertools cannot be copied from Python 3.14 on
        if isinstance(iterator, itertools.count | itertools.repeat):
            return repr(iterator)
        reduced = tuple(tuple(x) if isinstance(x, list) else x for x in gc.get_referents(iterator))
    return _map_iterators(position_of, reduced)


def copy_of(iterator: Any) -> Any:
    """Return an iterator at the same position; None if it cannot be copied."""
    if isinstance(iterator, (*_WITH_POSITION, types.GeneratorType)):
        return None
    try:
        make, args, *state = _map_iterators(copy_of, iterator.__reduce__())
        copy = make(*args)
        if state and state[0] is not None:
            copy.__setstate__(state[0])
    except (TypeError, Warning):
        return None
    return copy


def _map_iterators(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_map_iterators(change, part) for part in value)
    return change(value) if isinstance(value, (*ITERATORS, types.GeneratorType)) else value


def parts(position: Any) -> Iterator[Any]:
    """Yield the iterators and containers that a position refers to."""
    if isinstance(position, tuple):
        for part in position:
            yield from parts(part)
    else:
        yield position
