"""State that only the first call writes: constants are kept, and writes that change a result are refused."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import MutationError

X = jnp.asarray([[1.0, 2.0], [4.0, -1.0]])


class FirstCall(torch.nn.Module):
    first = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 100 if self.first else x
        self.first = False
        return y


class ToTraining(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * (1.0 if self.training else 3.0)
        self.train()
        return y


class Sorts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = [3.0, 1.0, 2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.numbers[0]
        self.numbers.sort()
        return y


class NotesShapes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 10 if x.shape not in self.seen else x
        self.seen.add(x.shape)
        return y


class Reorders(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recent = collections.OrderedDict(a=1.0, b=2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * next(iter(self.recent.values()))
        self.recent.move_to_end("b", last=False)
        return y


@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack"])
@pytest.mark.parametrize("make", [FirstCall, ToTraining, Sorts, NotesShapes, Reorders])
def test_a_write_that_changes_the_next_result_is_refused(make, backend):
    module = make().eval()
    expected = make().eval()(torch.tensor(np.asarray(X)))
    f = jtbridge.wrap(module, backend=backend)
    with pytest.raises(MutationError, match="writes to"):
        jax.jit(f)(X)
    np.testing.assert_array_equal(jtbridge.wrap(module)(X), expected)  # the state is as it was


@pytest.mark.parametrize("make", [FirstCall, ToTraining, Sorts, NotesShapes, Reorders])
def test_purity_reports_written_state(make):
    report = str(jtbridge.purity(make().eval(), X))
    assert "state written" in report
    assert "lazily built" not in report


class Mask(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask: Any = None
        self.length = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.length < len(x):
            self.length = len(x)
            self.mask = torch.ones(len(x), len(x)).tril()
        return self.mask[: len(x), : len(x)] @ x


@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack"])
def test_cached_table_and_its_length_are_stored(backend):
    module = Mask()
    got = jax.jit(jtbridge.wrap(module, backend=backend))(X)
    np.testing.assert_allclose(got, Mask()(torch.tensor(np.asarray(X))))
    assert module.length == 2
    assert module.mask.tolist() == [[1, 0], [1, 1]]


class Base:
    calls: list[int] = []  # noqa: RUF012 - it is shared on purpose
    scale = 2.0

    @classmethod
    def count(cls) -> int:
        cls.calls.append(1)
        return len(cls.calls)


class Sub(Base):
    pass


@pytest.mark.parametrize("backend", ["auto", "xla"])
def test_state_of_a_base_that_is_reached_through_the_subclass(backend):
    f = jtbridge.wrap(lambda x: x * Sub.count(), backend=backend)
    with pytest.raises(MutationError, match=r"`Base\.calls`"):
        jax.jit(f)(X)
    assert Base.calls == []
    g = jtbridge.wrap(lambda x: x * Sub.scale, backend=backend)

    @jax.jit
    def twice(x: jax.Array) -> Any:
        before = g(x)
        Base.scale = 5.0
        return before, g(x)

    try:
        before, after = twice(X)
    finally:
        Base.scale = 2.0
    np.testing.assert_array_equal(before, 2 * X)
    np.testing.assert_array_equal(after, 5 * X)


class KeepsLast(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        return self.last + 1


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
def test_module_that_stores_an_activation_can_be_batched_again():
    module = KeepsLast()
    f = jtbridge.wrap(module)
    for _ in range(3):
        np.testing.assert_array_equal(jax.vmap(f)(X), 2 * X + 1)
    with pytest.raises(MutationError, match=r"self\.last"):
        jax.jit(f)(X)
    np.testing.assert_array_equal(jax.jit(jtbridge.wrap(module, purity="allow"))(X), 2 * X + 1)
    torch.vmap(module)(torch.ones(2, 3))
    np.testing.assert_array_equal(jax.vmap(f)(X), 2 * X + 1)


class MakesConstant(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ones = torch.ones(2)
        return ((x * self.ones) ** 2).sum()


@pytest.mark.parametrize("transform", [jax.jacfwd, jax.hessian, lambda f: jax.vmap(jax.jacfwd(f))])
def test_constant_recreated_in_each_call(transform):
    got = jax.jit(transform(jtbridge.wrap(MakesConstant())))(X)
    np.testing.assert_allclose(got, transform(lambda x: (x**2).sum())(X))
