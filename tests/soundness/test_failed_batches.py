"""A batch that fails in torch.vmap runs row by row. Effects of the failed attempt are undone, or refused."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import jtbridge
from jtbridge.errors import MutationError

pytestmark = pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
ROWS = jnp.ones((4, 3))


def unbatchable(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def test_batch_of_cond_matches_its_rows():
    f = jtbridge.wrap(lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)))
    rows = jnp.array([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]])
    for _ in range(2):
        np.testing.assert_allclose(jax.vmap(f)(rows), [jnp.sin(rows[0]), jnp.cos(rows[1])], rtol=1e-6)


def test_other_shapes_after_a_success():
    log = []

    def f(x):
        if x.shape[0] == 2:
            return x * 2
        log.append(1)
        return unbatchable(x)

    g = jax.vmap(jtbridge.wrap(f))
    g(ROWS[:, :2])
    for count in (4, 8):
        assert (g(ROWS) == 3).all()
        assert len(log) == count


def test_side_effects_that_succeeded_before():
    log = []

    def f(x):
        log.append(1)
        return unbatchable(x) if len(log) > 2 else x * 2

    g = jax.vmap(jtbridge.wrap(f))
    for count in (1, 2, 6):
        g(ROWS)
        assert len(log) == count


def test_another_branch_after_a_success_is_refused_once():
    log, branch = [], {"unbatchable": False}

    def f(x):
        if branch["unbatchable"]:
            log.append(1)
            return unbatchable(x)
        return x * 2

    g = jax.vmap(jtbridge.wrap(f))
    g(ROWS)
    branch["unbatchable"] = True
    with pytest.raises(MutationError, match="`log`"):
        g(ROWS)
    log.clear()
    g(ROWS)
    assert len(log) == 4


def test_draws_match_a_loop():
    def f(x):
        return unbatchable(x + torch.rand(3)) + torch.nn.functional.dropout(x, 0.5) + random.random() + np.random.rand()

    def seed() -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)

    def following() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand()]

    seed()
    expected = torch.stack([f(torch.ones(3)) for _ in range(4)])
    after = following()
    seed()
    np.testing.assert_allclose(jax.vmap(jtbridge.wrap(f))(ROWS), expected.numpy(), rtol=1e-6)
    assert following() == after


class OtherThread:
    """A thread that draws numbers on request, while a wrapped function runs."""

    def __init__(self) -> None:
        self._numbers: queue.SimpleQueue = queue.SimpleQueue()  # a queue is not state that would be restored

    def draw(self) -> None:
        thread = threading.Thread(target=lambda: self._numbers.put(torch.rand(5).tolist()))
        thread.start()
        thread.join()

    def drawn(self) -> list[float]:
        return [x for _ in range(self._numbers.qsize()) for x in self._numbers.get()]


def batch(other: OtherThread) -> None:
    def f(x):
        other.draw()
        return unbatchable(x)

    jax.vmap(jtbridge.wrap(f))(ROWS[:2])


def report(other: OtherThread) -> None:
    def f(x):
        other.draw()
        return x + torch.rand(3)

    found = jtbridge.purity(jtbridge.wrap(f), ROWS[0])
    assert "random numbers" in str(found)


def recomputation(other: OtherThread) -> None:
    masks = []

    def block(x):
        masks.append(torch.rand(3).tolist())
        other.draw()
        return x * torch.tensor(masks[-1])

    f = jtbridge.wrap(lambda x: checkpoint(block, x, use_reentrant=True).sum())
    gradient = jax.grad(f)(ROWS[0])
    assert len(masks) == 2
    assert masks[0] == masks[1] == pytest.approx(gradient.tolist())


@pytest.mark.parametrize("run", [batch, report, recomputation])
def test_another_thread_draws_no_number_twice(run: Callable):
    other = OtherThread()
    torch.manual_seed(7)
    run(other)
    drawn = other.drawn()
    assert len(drawn) >= 10
    assert len(set(drawn)) == len(drawn)
    assert not set(torch.rand(20).tolist()) & set(drawn)
