"""The times that XLA and torch take for an operator, on random operands."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from torch import fx

from jtbridge._compat import OpOverload, on_own_thread
from jtbridge.core.array_types import ArrayType
from jtbridge.core.functions import TorchFunction
from jtbridge.core.messages import summary_of
from jtbridge.core.signals import raise_if_from_signal

from ._costs import tensor_of
from ._islands import island_of, torch_island_p
from ._program import jax_semantics, precision

_ROUNDS = 5
_TURN_SECONDS = 0.01  # how long each of the two programs is called in a round: at least once
_SETTLE_SECONDS = 0.02  # a wait, because torch's threads spin for a while after a call, on the cores that XLA needs


@dataclasses.dataclass(frozen=True)
class Times:
    """The milliseconds of a program in which XLA runs an operator, and of one in which torch does."""

    xla: float
    torch: float

    @classmethod
    def parse(cls, held: Any) -> Times:
        """Return the times in the content of a file.

        Raises:
            ValueError, TypeError, KeyError: the content has no times.
        """
        xla, torch = (float(held["milliseconds"][name]) for name in ("xla", "torch"))
        if not (0 < xla < math.inf and 0 < torch < math.inf):
            raise ValueError(f"{xla} and {torch} are not times")
        return cls(xla, torch)


def measure(fn: TorchFunction, lowered: ClosedJaxpr) -> Times | str:
    """Return the times of an island and of its lowering; return the error's text if one does not run.

    The measurement has its own thread, without the settings and traces of the thread that lowers a program. The two
    programs run like any program: after their operands are computed, and while this thread runs nothing else.
    """
    try:
        return on_own_thread(lambda: _measure(fn, lowered))
    except Exception as error:  # noqa: BLE001  (whatever torch or XLA raises, the program can do without)
        raise_if_from_signal(error)
        return summary_of(error)


def _measure(fn: TorchFunction, lowered: ClosedJaxpr) -> Times:
    device = jax.local_devices(backend="cpu")[0]
    by_torch = functools.partial(torch_island_p.bind, fn=fn, lowered=None)
    with jax_semantics(precision(fn.base)):
        arrays = [jax.device_put(x, device) for x in random_operands(fn)]
        # If a program has a callback, a call of `jit(f).lower(...).compile()` takes 60 us longer than one of `jit(f)`.
        programs = [jax.jit(jaxpr_as_fun(lowered)), jax.jit(by_torch)]
        times: list[float] = [math.inf, math.inf]
        for _ in range(_ROUNDS):
            for i, program in enumerate(programs):
                time.sleep(_SETTLE_SECONDS)
                jax.block_until_ready(program(*arrays))
                times[i] = min(times[i], _fastest_seconds(program, arrays))
    return Times(*(1e3 * seconds for seconds in times))


def _fastest_seconds(program: Callable[..., Any], arrays: Sequence[jax.Array]) -> float:
    """Return the seconds of the fastest call in one turn."""
    fastest, end = math.inf, time.perf_counter() + _TURN_SECONDS
    while True:
        start = time.perf_counter()
        jax.block_until_ready(program(*arrays))
        stop = time.perf_counter()
        fastest = min(fastest, stop - start)
        if stop > end:
            return fastest


def random_operands(fn: TorchFunction) -> list[np.ndarray]:
    """Return random operands of an island or of a batch of it, with values that its operator accepts."""
    island = island_of(fn)
    (call,) = (node for node in island.module.graph.nodes if isinstance(node.target, OpOverload))
    name = call.target.name().removeprefix("aten::")
    random = np.random.default_rng(0)
    rows = len(fn.in_types)
    below = _index_bound(call, name) if rows > 1 else 100
    arrays = [_random_array(random, type_, below) for type_ in fn.in_types]
    if "linalg" in name:  # a matrix that can be inverted, and is positive definite
        size = min(arrays[0].shape[-2:])
        arrays[0] = arrays[0] + size * np.eye(*arrays[0].shape[-2:], dtype=arrays[0].dtype)
    if "searchsorted" in name:
        arrays[0] = np.sort(arrays[0], axis=-1)
    return arrays


def _random_array(random: np.random.Generator, type_: ArrayType, below: int) -> np.ndarray:
    """Return random numbers: of mean 0 and from -1 to 1, or integers from 0 to `below`."""
    if type_.dtype.kind in "iu":
        return random.integers(0, min(below, np.iinfo(type_.dtype).max), type_.shape, type_.dtype)
    if type_.dtype.kind == "b":
        return random.integers(0, 2, type_.shape).astype(bool)
    numbers = random.uniform(-1, 1, type_.shape)
    if type_.dtype.kind == "c":
        numbers = numbers + 1j * random.uniform(-1, 1, type_.shape)
    return numbers.astype(type_.dtype)


def _index_bound(call: fx.Node, name: str) -> int:
    """Return the exclusive upper bound for the integers among the arguments of an operator, which are indices."""
    shapes = [tensor_of(x).shape if isinstance(x, fx.Node) else () for x in call.args]
    if name.startswith("embedding_dense_backward"):
        return int(call.args[2])  # type: ignore[arg-type]
    if name.startswith("max_pool2d_with_indices_backward"):
        return math.prod(shapes[1][-2:])
    if name.startswith(("index_put", "index.Tensor")):
        dims = [dim for dim, index in enumerate(call.args[1]) if index is not None]  # type: ignore[arg-type]
        return min(shapes[0][dim] for dim in dims)
    if len(call.args) > 1 and isinstance(call.args[1], int):  # along a dimension
        return shapes[0][call.args[1]]
    return 100
