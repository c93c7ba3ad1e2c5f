"""Effects that depend on values: conditions that are written to later, state and writes in a branch, caught errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import jtbridge
from jtbridge.capture import _watchdog
from jtbridge.errors import MutationError

pytestmark = [
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning"),
]
X = jnp.array([1.0, 2.0])


def flags_of_elements(x):
    active = x > 0
    for i in range(2):
        if active[i]:
            x = x * 3
            active[i] = False
    return x


def one_flag(x):
    flag = x.sum() > 0
    if flag:
        x = x * 2
        flag.fill_(False)
    return x + flag


def negated_flag(x):
    flag = (x.sum() > 0).reshape(1)
    y = x * 2 if flag else x * 3
    flag.logical_not_()
    return y * (1 + flag)


@pytest.mark.parametrize("by", ["auto", "xla", "dlpack"])
@pytest.mark.parametrize("fn", [flags_of_elements, one_flag, negated_flag])
def test_a_condition_that_is_written_to_afterwards(fn, by):
    f = jtbridge.wrap(fn, backend=by)
    for x in (X, -X, jnp.array([-1.0, 3.0])):
        tensor = torch.tensor(np.asarray(x), requires_grad=True)
        wanted = fn(tensor * 1)
        (slope,) = torch.autograd.grad(wanted.sum(), tensor)
        np.testing.assert_array_equal(jax.jit(f)(x), wanted.detach())
        np.testing.assert_array_equal(jax.jit(jax.grad(lambda v: f(v).sum()))(x), slope)
        np.testing.assert_array_equal(jax.jit(jax.vmap(f))(x[None])[0], wanted.detach())


class FirstBatch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.tensor(True))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        if self.first:
            self.mean.copy_(x)
            self.first.fill_(False)
        return x - self.mean


def test_a_module_that_initializes_itself_from_its_first_batch():
    net = jtbridge.module(FirstBatch())
    params, start = net.init()
    results = []
    for call in (net, jax.jit(net)):
        state = start
        for x in (X, X * 5):
            out, changed = call(params, state, x)
            state = state | changed
            results.append((out.tolist(), {name: value.tolist() for name, value in state.items()}))
    assert results[:2] == results[2:]
    assert results[1] == ([4, 8], {"first": False, "mean": [1, 2]})


@pytest.mark.parametrize("by", ["auto", "xla"])
def test_state_that_a_branch_writes_and_a_later_call_reads_is_refused(by):
    seen = {"negative": False}

    def f(x):
        y = x * (3 if seen["negative"] else 2)
        if x.sum() < 0:
            seen["negative"] = True
        return y

    with pytest.raises(MutationError, match="negative"):
        jax.jit(jtbridge.wrap(f, backend=by))(X)
    assert seen == {"negative": False}


class Best(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("best", torch.tensor(50.0))

    def forward(self, x):
        if float(x.sum()) > 100:
            self.best.copy_(x.sum())
        return x + self.best


def test_write_not_reached_by_example_values_is_not_lost():
    net = jtbridge.module(Best())
    params, state = net.init()
    f = jax.jit(net)
    assert f(params, state, X)[0].tolist() == [51, 52]
    with pytest.raises(Exception, match=r"writes to its argument `state\['best'\]` for these values"):
        jax.block_until_ready(f(params, state, 100 * X))
    assert net(params, state, 100 * X)[1]["best"] == 300

    @jtbridge.wrap(return_mutated=True)
    def g(n, x):
        if float(x.sum()) > 100:
            n.add_(1)
        return x + n

    with pytest.raises(Exception, match="writes to its argument `n` for these values"):
        jax.block_until_ready(jax.jit(g)(jnp.zeros(()), 100 * X))


CAUGHT: dict[str, tuple[Any, ...]] = {
    "floor_divide": (lambda a, b: a // b, [4, 6], [0, 3]),
    "remainder": (lambda a, b: a % b, [4, 6], [0, 3]),
    "fmod": (torch.fmod, [4, 6], [0, 3]),
    "div": (lambda a, b: torch.div(a, b, rounding_mode="trunc"), [4, 6], [0, 3]),
    "cholesky_ex": (lambda x: torch.linalg.cholesky_ex(x, check_errors=True)[0], [[1.0, 2.0], [2.0, 1.0]]),
    "inv_ex": (lambda x: torch.linalg.inv_ex(x, check_errors=True)[0], [[1.0, 1.0], [1.0, 1.0]]),
    "element": (lambda x, i: x[i[0]], [1.0, 2.0], [5]),
    "element of a tuple": (lambda x, i: x[(i[0],)], [1.0, 2.0], [5]),
    "binary_cross_entropy": (lambda p: F.binary_cross_entropy(p, torch.ones(2)), [1.0, 2.0]),
    "put": (lambda x, i: torch.put(x, i, torch.ones(1)), [1.0, 2.0], [5]),
    "index_reduce": (lambda x, i: x.index_reduce(0, i, torch.ones(1), "prod"), [1.0, 2.0], [5]),
    "masked_scatter": (lambda x, m: x.masked_scatter(m, torch.ones(1)), [1.0, 2.0], [True, True]),
    "embedding_bag": (lambda x, i: F.embedding_bag(i[None], x), [[1.0, 2.0]], [5]),
    "multi_margin_loss": (F.multi_margin_loss, [[1.0, 2.0]], [5]),
    "max_unpool1d": (lambda x, i: F.max_unpool1d(x[None], i[None], 2), [[1.0, 2.0]], [[0, 50]]),
    "searchsorted": (lambda x, i: torch.searchsorted(x, x, sorter=i), [1.0, 2.0], [0, 50]),
}


@pytest.mark.parametrize("name", CAUGHT)
def test_an_error_of_torch_that_the_function_catches(name):
    fn, *args = CAUGHT[name]
    arrays = [jnp.asarray(arg) for arg in args]
    good = torch.zeros(())
    with pytest.raises((RuntimeError, IndexError)):
        fn(*(torch.tensor(np.asarray(x)) for x in arrays))

    def f(*xs):
        try:
            return fn(*xs).double().sum() * 0 + 1
        except (RuntimeError, IndexError):
            return good.double() - 7

    assert float(jax.jit(jtbridge.wrap(f))(*arrays)) == float(f(*(torch.tensor(np.asarray(x)) for x in arrays))) == -7


def test_a_division_by_a_number_is_translated():
    """It raises for no values, so the exception handler does not matter."""

    def f(x):
        try:
            return x // 2
        except RuntimeError:
            return x

    assert jax.jit(jtbridge.wrap(f, backend="xla"))(jnp.array([5, 6])).tolist() == [2, 3]


def test_exception_handler_that_raises_is_translated():
    """As in torch_geometric: its test of the indices calls operators, but no value returns from it."""

    def f(x, i):
        try:
            return x.index_select(0, i)
        except (IndexError, RuntimeError) as error:
            if i.numel() > 0 and i.min() < 0:
                raise IndexError(f"negative indices, such as {i.min().item()}") from error
            if i.numel() > 0 and i.max() >= x.shape[0]:
                raise IndexError(f"too large indices, such as {i.max().item()}") from error
            raise

    assert jax.jit(jtbridge.wrap(f, backend="xla"))(X, jnp.array([1, 0])).tolist() == X[::-1].tolist()


class Last(torch.nn.Module):
    last = None

    def forward(self, x):
        self.last = x.sum().item()
        return x * 2 if self.last > 0 else x * 3


def test_attribute_is_restored_after_any_exception():
    module = Last()
    with pytest.raises(MutationError):
        jax.jit(jtbridge.wrap(module))(X)
    assert module.last is None
    assert "last" not in vars(module)


def test_integer_loop_that_ends_only_for_real_values(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_watchdog, "SECONDS", 1.0)

    def f(x):
        n, count = int(x.sum()), 0
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            count += 1
        return x * count

    assert jax.jit(jtbridge.wrap(f))(jnp.array([2.0, 1.0])).tolist() == [14, 7]


def test_formatted_number_inside_an_exception_handler():
    def f(x):
        v = x.sum().item()
        try:
            text = f"{v:.2f}"
        except Exception:  # noqa: BLE001  (as careless code does)
            text = "-1"
        return x * float(text)

    assert jax.jit(jtbridge.wrap(f))(X).tolist() == [3, 6]


@pytest.mark.parametrize("by", ["auto", "dlpack"])
@pytest.mark.parametrize("x", [X, -X])
def test_a_constant_that_branches_build_differently_is_refused(by, x):
    memo = {}

    def f(x):
        if x.sum() > 0:
            memo.setdefault("a", torch.ones(2) * 3)
        else:
            memo.setdefault("a", torch.ones(2) * 7)
        return x * memo["a"]

    with pytest.raises(MutationError, match="memo"):
        jax.jit(jtbridge.wrap(f, backend=by))(x)
    assert not memo


@pytest.mark.parametrize("build_in", ["both", "first", "second"])
def test_a_constant_that_branches_build_alike_is_translated(build_in):
    memo = {}

    def f(x):
        if x.sum() > 0:
            return x * memo.setdefault("a", torch.ones(2) * 3) if build_in != "second" else x
        return x - memo.setdefault("a", torch.ones(2) * 3) if build_in != "first" else x

    g = jax.jit(jtbridge.wrap(f, backend="xla"))
    for x in (X, -X):
        memo.clear()
        wanted = f(torch.tensor(np.asarray(x)))
        memo.clear()
        np.testing.assert_array_equal(g(x), wanted)
