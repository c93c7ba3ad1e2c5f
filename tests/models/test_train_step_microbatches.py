"""`jtbridge.train_step` with microbatches: gradients, metrics and state are accumulated."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import jtbridge
from jtbridge.errors import ArgumentError

from .training import BATCH, KEY, Noise, X, close, loss, mlp, torch_loss

optax = pytest.importorskip("optax")
pytestmark = pytest.mark.usefixtures("standard_promotion")


class Tagger(nn.Module):
    """Scores of tokens, and their mean loss over labels that are not -100, as models of transformers have it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 4)
        self.out = nn.Linear(4, 9)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.out(self.embed(ids)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("accumulate", [2, 4, 16])
def test_accumulated_gradients_match_the_whole_batch(accumulate: int):
    net = jtbridge.module(mlp(nn.LayerNorm(8)))
    whole = jtbridge.train_step(net, loss, optax.sgd(0.5))
    parts = jtbridge.train_step(net, loss, optax.sgd(0.5), accumulate=accumulate)
    (expected, metrics), (found, found_metrics) = (step(step.init(KEY), BATCH) for step in (whole, parts))
    for name, value in expected.params.items():
        np.testing.assert_allclose(found.params[name], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found_metrics["loss"], metrics["loss"], rtol=1e-5)


def test_the_state_passes_through_the_microbatches():
    model = mlp(nn.BatchNorm1d(8))
    step = jtbridge.train_step(jtbridge.module(model), loss, optax.sgd(0.5), accumulate=4)
    train, _ = step(step.init(KEY), BATCH)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for part in range(4):
        (torch_loss(model, slice(part, None, 4)) / 4).backward()
    optimizer.step()
    close(train.params, model)
    close(train.state, model)
    assert int(train.state["1.num_batches_tracked"]) == 4


def test_weights_make_a_mean_over_tokens_exact():
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 9, (4, 6)).astype(np.int32)
    lengths = np.array([[6], [1], [3], [0]])  # the last one has no token at all: its mean is NaN
    batch = {"ids": ids, "labels": np.where(np.arange(6) < lengths, (ids + 1) % 9, -100).astype(np.int32)}
    net = jtbridge.module(Tagger())

    def run(**options: Any) -> Any:
        step = jtbridge.train_step(net, lambda model, batch: model(**batch), optax.sgd(1.0), **options)
        return step(step.init(KEY), batch)

    expected, metrics = run()
    found, found_metrics = run(accumulate=4, weight=lambda batch: (batch["labels"] >= 0).sum())
    for name, value in expected.params.items():
        np.testing.assert_allclose(found.params[name], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found_metrics["loss"], metrics["loss"], rtol=1e-5)
    assert np.isnan(run(accumulate=4)[1]["loss"])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": X, "y": BATCH["y"]}, "`accumulate=3` must divide the batch, which has 16 rows"),
        ({"x": X[:15], "y": BATCH["y"]}, r"\['x'\]: 15, \['y'\]: 16"),
        ({"x": X[:15], "y": np.float32(0)}, r"\['y'\]: None"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(batch: Any, message: str):
    step = jtbridge.train_step(jtbridge.module(mlp()), loss, optax.sgd(0.1), accumulate=3)
    with pytest.raises(ArgumentError, match=message):
        step(step.init(KEY), batch)


def test_metrics_are_returned_and_averaged():
    def with_metrics(model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        return jnp.mean((out - batch["y"]) ** 2), {"mean": out.mean(), "rows": batch["x"].shape[0] * jnp.ones(())}

    net = jtbridge.module(mlp())
    for accumulate, rows in ((1, 16), (4, 4)):
        step = jtbridge.train_step(net, with_metrics, optax.sgd(0.1), accumulate=accumulate)
        metrics = step(step.init(KEY), BATCH)[1]
        assert metrics["rows"] == rows
        np.testing.assert_allclose(metrics["mean"], mlp()(torch.from_numpy(X)).mean().detach(), rtol=1e-4)


@pytest.mark.parametrize("metric", [lambda x: x, lambda x: (x > 0).sum()], ids=["an array", "an integer"])
def test_metrics_that_have_no_mean_are_refused_with_microbatches(metric: Any):
    def with_metric(model: Any, batch: Any) -> Any:
        return loss(model, batch), {"it": metric(batch["x"])}

    net = jtbridge.module(mlp())
    step = jtbridge.train_step(net, with_metric, optax.sgd(0.1))
    assert "it" in step(step.init(KEY), BATCH)[1]
    step = jtbridge.train_step(net, with_metric, optax.sgd(0.1), accumulate=2)
    with pytest.raises(ArgumentError, match="metric `it`"):
        step(step.init(KEY), BATCH)


def test_each_microbatch_draws_its_own_mask():
    def one_row(model: Any, batch: Any) -> Any:
        out = model()
        kept = batch["place"][0] + jnp.zeros(())
        return (out * 2.0 ** jnp.arange(64)).sum(), {"place": kept}

    net = jtbridge.module(Noise())
    step = jtbridge.train_step(net, one_row, optax.sgd(1.0), accumulate=2)
    train, _ = step(step.init(KEY), {"place": np.arange(2, dtype=np.float32)})
    kept = (1 - train.params["weight"]) / 2.0 ** jnp.arange(64)  # 0, 1 or 2: the mean of two scaled masks
    assert set(np.asarray(kept).round(3).tolist()) == {0.0, 1.0, 2.0}


class Teacher(nn.Module):
    """A student, and a frozen teacher that follows it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.student(x), self.teacher(x)


def test_frozen_parameters_that_the_loss_updates():
    def follow(model: Any, batch: Any) -> Any:
        out, target = model(batch)
        moved = 0.5 * model.state["teacher.weight"] + 0.5 * model.params["student.weight"]
        model.state["teacher.weight"] = moved
        return jnp.mean((out - target) ** 2)

    step = jtbridge.train_step(jtbridge.module(Teacher()), follow, optax.sgd(0.1), accumulate=2)
    train = step.init(KEY)
    model, batch = Teacher(), torch.arange(12.0).reshape(4, 3) / 12
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for _ in range(2):
        train, _ = step(train, jnp.asarray(batch.numpy()))
        optimizer.zero_grad()
        for part in (batch[::2], batch[1::2]):
            out, target = model(part)
            ((out - target) ** 2).mean().div(2).backward()
            model.teacher.weight.copy_(0.5 * model.teacher.weight + 0.5 * model.student.weight.detach())
        optimizer.step()
    for name, value in {**train.params, **train.state}.items():
        np.testing.assert_allclose(value, model.state_dict()[name], rtol=1e-5, atol=1e-6)
