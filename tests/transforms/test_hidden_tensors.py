"""Tensors that pass from one differentiated eager call to another without JAX are refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import DifferentiationError

X, ONES = jnp.asarray([1.0, 2.0, 3.0]), jnp.ones(3)


class Items(dict):
    __hash__ = object.__hash__  # type: ignore[assignment]


class Holder:
    def __init__(self, value: Any):
        self.value = value


CONTAINERS = {
    "distribution": (lambda x: torch.distributions.Normal(x * 2, torch.ones(3)), lambda d: d.mean),
    "subclass of dict": (lambda x: Items(a=x * 2), lambda d: d["a"]),
    "object": (lambda x: Holder([x * 2]), lambda d: d.value[0]),
    "closure": (lambda x: _closure(x * 2), lambda d: d()),
}


def _closure(value: torch.Tensor) -> Any:
    return lambda: value


@pytest.mark.parametrize("name", CONTAINERS)
def test_an_object_that_holds_a_result(name):
    make, read = CONTAINERS[name]
    encode, decode = jtbridge.wrap(make), jtbridge.wrap(lambda d, v: (read(d) * v).sum())
    assert float(decode(encode(X), ONES)) == 12
    with pytest.raises(DifferentiationError, match="that holds tensors, and JAX does not know its type"):
        jax.grad(lambda x: decode(encode(x), ONES))(X)
    with pytest.raises(DifferentiationError, match="that holds tensors, and JAX does not know its type"):
        jax.jvp(lambda x: decode(encode(x), ONES), (X,), (X,))


class Recurrent(torch.nn.Module):
    def __init__(self, *, detached: bool):
        super().__init__()
        self.h, self.detached = torch.zeros(3), detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.h + x)
        self.h = h.detach() if self.detached else h
        return h * 1


def rolled(x: Any, module: Any, wrap: Any = lambda f: f) -> Any:
    f = wrap(module)
    f(x)
    f(x)
    return f(x).sum()


@pytest.mark.parametrize(
    "way", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,)), lambda f: lambda x: jax.vjp(f, x)]
)
def test_state_that_depends_on_an_earlier_call(way):
    with pytest.raises(DifferentiationError, match=r"store `tensor\.detach\(\)`"):
        way(lambda x: rolled(x, Recurrent(detached=False), jtbridge.wrap))(X)


def test_state_that_is_detached_or_not_differentiated():
    tensor = torch.tensor(np.asarray(X))
    np.testing.assert_allclose(
        jax.grad(lambda x: rolled(x, Recurrent(detached=True), jtbridge.wrap))(X),
        torch.func.grad(lambda x: rolled(x, Recurrent(detached=True)))(tensor),
        rtol=1e-6,
    )
    value = rolled(X, Recurrent(detached=False), jtbridge.wrap)
    np.testing.assert_allclose(value, rolled(tensor, Recurrent(detached=False)), rtol=1e-6)


@pytest.mark.parametrize("large", [False, True])
def test_stored_tensor_read_without_a_differentiated_argument(large):
    kept: list[torch.Tensor] = []
    keep = jtbridge.wrap(lambda x: (kept.append(x * 2), x * 3)[1])
    v = jnp.ones((1 << 17) if large else 3)
    read = jtbridge.wrap(lambda v: kept[-1].sum() * v.mean())
    with pytest.raises(DifferentiationError, match="reads a tensor that an earlier call computed"):
        jax.grad(lambda x: (keep(x), x.sum() * read(v))[1])(X)
    assert float(read(v)) == 12  # no derivative is under way


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
def test_rows_of_which_one_returns_a_number():
    rows = jnp.asarray([[0.5, 1.0], [-1.0, 1.0]])
    for other in (0, False, lambda x: (x > 0).sum()):
        f = jtbridge.wrap(lambda x: x.sum() if x[0] > 0 else other(x) if callable(other) else other)  # noqa: B023
        for order in (rows, rows[::-1]):
            got = jax.vmap(jax.grad(lambda a: f(a) * 1.0))(order)  # noqa: B023
            assert got.tolist() == [[float(row[0] > 0)] * 2 for row in order]


@pytest.mark.parametrize("declared", [(), (0, 3), (3,)])
def test_declared_shapes_that_are_false_as_a_condition(declared):
    f = jtbridge.wrap(lambda a: a * 2, output_shapes=jax.ShapeDtypeStruct(declared, jnp.float32))
    if declared == (3,):
        assert f(X).tolist() == [2, 4, 6]
    else:
        with pytest.raises(jtbridge.errors.OutputMismatchError):
            f(X)
