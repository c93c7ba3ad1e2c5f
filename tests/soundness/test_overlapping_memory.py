"""Writes to tensors of which several elements are one in memory: only a call of torch computes them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import DifferentiationError, TranslationError

pytestmark = [
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning"),
    pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated"),
]

Write = Callable[[torch.Tensor], object]

X = np.arange(6.0, dtype=np.float32).reshape(2, 3) + 1

WHOLE: dict[str, Write] = {
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(0.5),
    "masked_fill_": lambda t: t.masked_fill_(t > 2, 0),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([0, 1]), 5.0),
    "unfold": lambda t: t[0].unfold(0, 2, 1).zero_(),
    "unfold, added to": lambda t: t[0].unfold(0, 2, 1).add_(1),
}
PARTS: dict[str, Write] = {
    "a row": lambda t: t.__setitem__(0, 1e-3 * t[1]),
    "a row, multiplied": lambda t: t[1].mul_(2),
    "a window": lambda t: t[0].unfold(0, 2, 1)[0].mul_(3),
    "a part": lambda t: t.as_strided((2, 3), (0, 1))[0].mul_(2),
    "several rows": lambda t: torch._foreach_mul_([t[0], t[1]], 2),
}
WRITES = WHOLE | PARTS


def written_by(write: Write) -> Callable[[torch.Tensor], torch.Tensor]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = 1e4 * x * x
        write(y.expand(2, *y.shape))
        return y

    return fn


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("by", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize("name", WRITES)
def test_results(name: str, by: str, jitted: bool):
    fn = written_by(WRITES[name])
    f = jtbridge.wrap(fn, backend=by)
    many = jax.vmap(f)
    expected = torch.stack([fn(row) for row in torch.from_numpy(X)]).numpy()
    np.testing.assert_array_equal((jax.jit(f) if jitted else f)(X[0]), expected[0])
    np.testing.assert_array_equal((jax.jit(many) if jitted else many)(X), expected)


@pytest.mark.parametrize("name", WRITES)
def test_a_translation_is_refused(name: str):
    f = jtbridge.wrap(written_by(WRITES[name]), backend="xla")
    with pytest.raises(TranslationError, match="several elements are one in memory"):
        jax.jit(f)(X[0])


@pytest.mark.parametrize("transform", [jax.jacrev, jax.jacfwd])
@pytest.mark.parametrize("by", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize("name", WHOLE)
def test_derivatives_of_whole_writes_are_refused(name: str, by: str, transform: Callable):
    f = jtbridge.wrap(written_by(WHOLE[name]), backend=by)
    with pytest.raises(DifferentiationError, match=r"several elements are one in memory.*clone"):
        jax.jit(transform(f))(X[0])


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("transform", [jax.jacrev, jax.jacfwd])
@pytest.mark.parametrize("by", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize("name", PARTS)
def test_derivatives_of_writes_to_parts(name: str, by: str, transform: Callable, jitted: bool):
    fn = written_by(PARTS[name])
    x = torch.from_numpy(X[0])
    scales = (fn(x) / (1e4 * x * x)).numpy()  # every write multiplies the elements
    jacobian = transform(jtbridge.wrap(fn, backend=by))
    found = (jax.jit(jacobian) if jitted else jacobian)(X[0])
    np.testing.assert_allclose(found, np.diag(2e4 * X[0] * scales), rtol=1e-6)


def test_a_copy_is_translated():
    """An expanded tensor that is read, and a copy of one that is written to, are as any other."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        wide = x.expand(2, 3)
        x = x * 2
        x += wide[0]
        return wide.clone().zero_() + x.contiguous().fill_(3) + wide

    f = jtbridge.wrap(fn, backend="xla")
    np.testing.assert_array_equal(jax.jit(f)(X[0]), 3 + np.stack([X[0], X[0]]))
    np.testing.assert_array_equal(jax.jacfwd(lambda x: jnp.sum(f(x), 0))(X[0]), 2 * np.eye(3))


def test_views_changed_in_place_are_no_writes():
    def fn(x: torch.Tensor) -> torch.Tensor:
        wide = (x * x).expand(2, 3)
        wide.t_()
        return wide * 2

    f = jtbridge.wrap(fn, backend="dlpack")
    found = jax.jit(jax.jacrev(f))(X[0])
    np.testing.assert_array_equal(found[:, 0], np.diag(4 * X[0]))
