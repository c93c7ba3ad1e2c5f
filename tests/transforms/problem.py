"""A case with concrete arguments, as the same function in JAX and in torch."""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import SequentialVmapWarning

from .cases import CASES, Case

_BY_NAME = {case.name: case for case in CASES}
assert len(_BY_NAME) == len(CASES), "two cases share a name"

ALL = sorted(_BY_NAME)
_REAL_ARGUMENTS = [name for name in ALL if not name.startswith(("complex", "spectrum", "view_as_complex"))]
MOVING = [name for name in ALL if name != "no_float_argument"]  # they have something to differentiate
REAL = [name for name in _REAL_ARGUMENTS if name in MOVING]
TWICE = [name for name in MOVING if _BY_NAME[name].twice]
ONCE = [name for name in MOVING if not _BY_NAME[name].twice]
REAL_TWICE = [name for name in REAL if name in TWICE]


class Problem:
    """One case: `wrapped` by jtbridge and `case.fn` in torch, on the same numbers.

    ``jax_fn`` and ``torch_fn`` take its float and complex arguments alone and return the list of its float and
    complex results; derivatives are taken of these.
    """

    def __init__(self, name: str, seed: int = 0, **options: Any):
        self.case: Case = _BY_NAME[name]
        self.wrapped = jtbridge.wrap(self.case.fn, **options)
        self._rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
        leaves, self.tree = jax.tree.flatten(self.case.arguments(self._rng))
        self.leaves = [_narrowed(leaf) for leaf in leaves]
        self._positions = [i for i, leaf in enumerate(self.leaves) if _is_float(leaf)]
        self.primals = [self.leaves[i] for i in self._positions]

    @property
    def arguments(self) -> tuple:
        """Return all arguments, as JAX arrays and static values."""
        return self.tree.unflatten([jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in self.leaves])

    def torch_result(self, leaves: Sequence[Any] | None = None) -> Any:
        """Return torch's result for these argument leaves."""
        leaves = self.leaves if leaves is None else leaves
        return self.case.fn(*self.tree.unflatten([tensor(x) if isinstance(x, np.ndarray) else x for x in leaves]))

    def jax_fn(self, *primals: Any) -> list[jax.Array]:
        leaves = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in self.leaves]
        for position, x in zip(self._positions, primals, strict=True):
            leaves[position] = x
        out = jax.tree.leaves(self.wrapped(*self.tree.unflatten(leaves)))
        return [y for y in out if isinstance(y, jax.Array) and jnp.issubdtype(y.dtype, jnp.inexact)]

    def torch_fn(self, *primals: torch.Tensor) -> list[torch.Tensor]:
        leaves = [tensor(x) if isinstance(x, np.ndarray) else x for x in self.leaves]
        for position, x in zip(self._positions, primals, strict=True):
            leaves[position] = x.clone()  # the function may write to it
        out = jax.tree.leaves(self.case.fn(*self.tree.unflatten(leaves)))
        return [y for y in out if isinstance(y, torch.Tensor) and (y.is_floating_point() or y.is_complex())]

    def jax_loss(self, *primals: Any) -> jax.Array:
        """Return a real scalar that depends on all results, with nonzero second derivatives."""
        out = self.jax_fn(*primals)
        terms = [
            jnp.sum(jnp.real(jnp.asarray(w) * y)) + jnp.sum(jnp.real(y * y.conj()) / 2)
            for w, y in zip(self._weights(out), out, strict=True)
        ]
        return jnp.sum(jnp.stack([t.astype(_widest(terms)) for t in terms]))

    def torch_loss(self, *primals: torch.Tensor) -> torch.Tensor:
        out = self.torch_fn(*primals)
        terms = [
            (tensor(w) * y).real.sum() + (y * y.conj()).real.sum() / 2
            for w, y in zip(self._weights(out), out, strict=True)
        ]
        return torch.stack(terms).sum() if len({t.dtype for t in terms}) == 1 else sum(t.double() for t in terms)

    def like(self, arrays: Sequence[Any], seed: int = 1) -> list[np.ndarray]:
        """Return random arrays of the same shapes and dtypes: tangents, cotangents, directions, batch rows."""
        rng = np.random.default_rng([zlib.crc32(self.case.name.encode()), seed])
        return [random_like(rng, tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in arrays]

    def batching(self) -> contextlib.AbstractContextManager:
        """Context for a vmap of the function: where torch cannot batch it, jtbridge has to warn."""
        if self.case.batches or self.wrapped.backend in ("auto", "xla"):  # JAX batches a translated function
            return contextlib.nullcontext()
        return pytest.warns(SequentialVmapWarning, match="its rows run one after another")

    def batching_derivatives(self) -> contextlib.AbstractContextManager:
        """Context for a vmap of derivatives: it allows a warning if torch has no batching rule."""
        return contextlib.nullcontext() if self.case.derivatives_batch else _rows_allowed()

    def _weights(self, out: Sequence[Any]) -> list[np.ndarray]:
        return self.like(out, seed=99)


def tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor with separate memory."""
    return torch.from_numpy(np.array(array))


def tensors(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    return [tensor(x) for x in arrays]


def jaxes(arrays: Sequence[np.ndarray]) -> list[jax.Array]:
    return [jnp.asarray(x) for x in arrays]


def random_like(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = rng.normal(size=shape)
    if "complex" in dtype:
        values = values + 1j * rng.normal(size=shape)
    return np.asarray(values, dtype)


@contextlib.contextmanager
def _rows_allowed() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SequentialVmapWarning)
        yield


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fc"


def _narrowed(leaf: Any) -> Any:
    if not _is_float(leaf) or jax.config.jax_enable_x64:
        return leaf
    return leaf.astype(np.complex64 if leaf.dtype.kind == "c" else np.float32)


def _widest(terms: Sequence[jax.Array]) -> Any:
    return max((t.dtype for t in terms), key=lambda d: d.itemsize)
