"""Writes to views that are not translated, for example to elements that share memory: only torch computes them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import TranslationError

pytestmark = [
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning"),
    pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated"),
]

Write = Callable[[torch.Tensor], object]

X = np.arange(6.0, dtype=np.float32).reshape(2, 3) + 1

REFUSED_BY_AUTOGRAD: dict[str, Write] = {
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(0.5),
    "masked_fill_": lambda t: t.masked_fill_(t > 2, 0),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([0, 1]), 5.0),
}
WINDOWS: dict[str, Write] = {
    "all windows": lambda t: t[0].unfold(0, 2, 1).zero_(),
    "all windows, added to": lambda t: t[0].unfold(0, 2, 1).add_(1),
}
PARTS: dict[str, Write] = {
    "a row": lambda t: t.__setitem__(0, 1e-3 * t[1]),
    "a row, multiplied": lambda t: t[1].mul_(2),
    "a window": lambda t: t[0].unfold(0, 2, 1)[0].mul_(3),
    "a part": lambda t: t.as_strided((2, 3), (0, 1))[0].mul_(2),
    "several rows": lambda t: torch._foreach_mul_([t[0], t[1]], 2),
}
WRITES = REFUSED_BY_AUTOGRAD | WINDOWS | PARTS


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
    with pytest.raises(TranslationError, match=r"cannot be translated\. Write to a `clone"):
        jax.jit(f)(X[0])


@pytest.mark.parametrize("transform", [jax.jacrev, jax.jacfwd])
@pytest.mark.parametrize("by", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize("name", REFUSED_BY_AUTOGRAD)
def test_derivatives_that_autograd_refuses(name: str, by: str, transform: Callable):
    f = jtbridge.wrap(written_by(REFUSED_BY_AUTOGRAD[name]), backend=by)
    with pytest.raises(jax.errors.JaxRuntimeError, match="more than one element of the written-to tensor"):
        jax.jit(transform(f))(X[0]).block_until_ready()


@pytest.mark.parametrize("transform", [jax.jacrev, jax.jacfwd])
@pytest.mark.parametrize("by", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize("name", WINDOWS)
def test_derivatives_match_autograd(name: str, by: str, transform: Callable):
    """Torch's second derivatives and forward mode are wrong for some of these."""
    fn = written_by(WINDOWS[name])
    found = jax.jit(transform(jtbridge.wrap(fn, backend=by)))(X[0])
    expected = torch.autograd.functional.jacobian(fn, torch.from_numpy(X[0]))
    np.testing.assert_array_equal(found, expected)


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


READ_MEANWHILE: dict[str, Write] = {
    "a column": lambda t: t.div_(t[:, :1]),
    "the columns before": lambda t: t[:, 1:].add_(t[:, :-1]),
    "the columns after": lambda t: t[:, :-1].copy_(t[:, 1:]),
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", READ_MEANWHILE)
def test_elements_that_are_read_and_written(name: str, jitted: bool):
    """Torch reads some elements that it has just written. A functional program would not."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x[:, None] + x
        READ_MEANWHILE[name](y)
        return y

    f = jtbridge.wrap(fn)
    many = jax.vmap(f)
    expected = torch.stack([fn(row) for row in torch.from_numpy(X)]).numpy()
    np.testing.assert_array_equal((jax.jit(f) if jitted else f)(X[0]), expected[0])
    if jitted:
        np.testing.assert_array_equal(jax.jit(many)(X), expected)


READ_AS_A_WHOLE: dict[str, Write] = {
    "addmm_": lambda t: t.addmm_(t, t),
    "mm": lambda t: torch.mm(t, t, out=t),
    "masked_scatter_": lambda t: t.masked_scatter_(t > 3, t),
    "one tensor twice": lambda t: torch._foreach_mul_([t, t], 2.0),
}
BY_ELEMENT: dict[str, Write] = {
    "mul_": lambda t: t.mul_(t),
    "copy_": lambda t: t.copy_(t),
    "lerp_": lambda t: t.lerp_(t, t),
    "out=": lambda t: torch.atan2(t, t, out=t),
}


def on_a_copy(write: Write) -> Callable[[torch.Tensor], torch.Tensor]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        write(y)
        return y

    return fn


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("by", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize("name", READ_AS_A_WHOLE | BY_ELEMENT)
def test_tensors_that_are_read_and_written(name: str, by: str, jitted: bool):
    """A product of matrices reads elements of its argument after it has written others."""
    fn = on_a_copy((READ_AS_A_WHOLE | BY_ELEMENT)[name])
    f = jtbridge.wrap(fn, backend=by)
    many = jax.vmap(f)
    squares = np.random.default_rng(0).normal(3, 1, (3, 4, 4)).astype(np.float32)
    expected = np.stack([fn(torch.from_numpy(square)) for square in squares])
    np.testing.assert_allclose((jax.jit(f) if jitted else f)(squares[0]), expected[0], rtol=1e-6)
    np.testing.assert_allclose((jax.jit(many) if jitted else many)(squares), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["addmm_", "mm", "masked_scatter_"])
def test_translation_of_a_write_to_its_own_source_is_refused(name: str):
    f = jtbridge.wrap(on_a_copy(READ_AS_A_WHOLE[name]), backend="xla")
    with pytest.raises(TranslationError, match=r"cannot be translated\. Write to a `clone"):
        jax.jit(f)(np.ones((4, 4), np.float32))


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_a_write_by_element_is_translated(name: str):
    fn = on_a_copy(BY_ELEMENT[name])
    found = jax.jit(jtbridge.wrap(fn, backend="xla"))(X)
    np.testing.assert_allclose(found, fn(torch.from_numpy(X)), rtol=1e-6)


SCATTERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "select_scatter": lambda t: t.select_scatter(-t[0], 0, -1),
    "slice_scatter": lambda t: t.slice_scatter(-t[:1], 0, 1, 2),
    "diagonal_scatter": lambda t: t.diagonal_scatter(-t.diagonal()),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_a_copy_with_overlapping_elements(name: str):
    """Torch writes to a copy with the memory layout of the windows."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return SCATTERS[name]((x * 1)[0].unfold(0, 2, 1))

    f = jtbridge.wrap(fn)
    expected = np.stack([fn(x) for x in torch.from_numpy(np.stack([X, -X]))])
    np.testing.assert_array_equal(jax.jit(f)(X), expected[0])
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(np.stack([X, -X])), expected)
    with pytest.raises(TranslationError, match=f"{name}.*cannot be translated"):
        jax.jit(jtbridge.wrap(fn, backend="xla"))(X)


@pytest.mark.parametrize("name", SCATTERS)
def test_a_copy_of_an_expanded_tensor_is_translated(name: str):
    def fn(x: torch.Tensor) -> torch.Tensor:
        return SCATTERS[name]((x * 1)[:, :1].expand(2, 2))

    found = jax.jit(jtbridge.wrap(fn, backend="xla"))(X)
    np.testing.assert_array_equal(found, fn(torch.from_numpy(X)))


def test_halves_of_one_memory_are_translated():
    """Their elements alternate in memory, and no element is in both."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        left, right = y.chunk(2, -1)
        left += right
        right *= left
        y[::2] -= y[1::2]
        return y

    x = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    f = jtbridge.wrap(fn, backend="xla")
    np.testing.assert_array_equal(jax.jit(f)(x), fn(torch.from_numpy(x)))


def test_a_copy_is_translated():
    """An expanded tensor that is only read is an ordinary tensor, and so is a copy of one that is written to."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        wide = x.expand(2, 3)
        x = x * 2
        x += wide[0]
        return wide.clone().zero_() + x.contiguous().fill_(3) + wide

    f = jtbridge.wrap(fn, backend="xla")
    np.testing.assert_array_equal(jax.jit(f)(X[0]), 3 + np.stack([X[0], X[0]]))
    np.testing.assert_array_equal(jax.jacfwd(lambda x: jnp.sum(f(x), 0))(X[0]), 2 * np.eye(3))


GAPS: dict[str, Write] = {
    "the last element": lambda t: t.unfold(0, 2, 2).mul_(3),
    "between windows": lambda t: t.unfold(0, 1, 2).mul_(3),
    "a view of windows": lambda t: t[None].unfold(1, 2, 2)[..., 0].mul_(3),
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", GAPS)
def test_elements_outside_windows_are_unchanged(name: str, jitted: bool):
    """Torch's functional graph of such a write has zeros in place of these elements."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * x
        GAPS[name](y)
        return y

    f = jtbridge.wrap(fn)
    x = torch.from_numpy(X[0])
    for transform in (jax.jacrev, jax.jacfwd):
        derivative = jax.jit(transform(f)) if jitted else transform(f)
        np.testing.assert_array_equal(derivative(X[0]), torch.autograd.functional.jacobian(fn, x))
    np.testing.assert_array_equal((jax.jit(f) if jitted else f)(X[0]), fn(x))
    many = jax.vmap(f)
    np.testing.assert_array_equal((jax.jit(many) if jitted else many)(X), torch.stack([fn(r) for r in torch.tensor(X)]))
    with pytest.raises(TranslationError, match="whose windows leave out elements of the tensor"):
        jax.jit(jtbridge.wrap(fn, backend="xla"))(X[0])


def test_a_write_to_windows_of_all_elements_is_translated():
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * x
        y.unfold(0, 3, 3).mul_(2)
        return y

    f = jtbridge.wrap(fn, backend="xla")
    np.testing.assert_array_equal(jax.jit(f)(X.ravel()), 2 * X.ravel() ** 2)


def test_in_place_view_changes_are_not_writes():
    def fn(x: torch.Tensor) -> torch.Tensor:
        wide = (x * x).expand(2, 3)
        wide.t_()
        return wide * 2

    f = jtbridge.wrap(fn, backend="dlpack")
    found = jax.jit(jax.jacrev(f))(X[0])
    np.testing.assert_array_equal(found[:, 0], np.diag(4 * X[0]))


def squared(x: torch.Tensor) -> torch.Tensor:
    return x[:, None] * x + x


OUT: dict[str, Write] = {
    "sum of products": lambda t: torch.addmm(t, t * 2, t * 3, out=t),
    "sum of products, by keywords": lambda t: torch.addmm(input=t, mat1=t * 2, mat2=t * 3, out=t),
    "running sum": lambda t: torch.cumsum(t, 0, out=t),
    "elements": lambda t: torch.mul(t + 1, t, out=t),
}
READ_BY_OUT: dict[str, Write] = {
    "product": lambda t: torch.mm(t, t + 1, out=t),
    "factor of a sum of products": lambda t: torch.addmm(t, t + 1, t, out=t),
    "row": lambda t: torch.addmm(t[0], t + 1, t + 2, out=t),
    "part in a list": lambda t: torch._foreach_copy_([t[:, 1:]], [t[:, :-1]]),
}


@pytest.mark.parametrize("name", [*OUT, *READ_BY_OUT])
def test_results_written_to_an_argument(name: str):
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = squared(x)
        (OUT | READ_BY_OUT)[name](y)
        return y

    f = jtbridge.wrap(fn)
    expected = fn(torch.from_numpy(X[0])).numpy()
    np.testing.assert_allclose(f(X[0]), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(f)(X[0]), expected, rtol=1e-6)
    if name in OUT:  # torch defines the result
        np.testing.assert_allclose(jax.jit(jtbridge.wrap(fn, backend="xla"))(X[0]), expected, rtol=1e-6)
    else:
        with pytest.raises(TranslationError, match="memory that it reads as other elements"):
            jax.jit(jtbridge.wrap(fn, backend="xla"))(X[0])
