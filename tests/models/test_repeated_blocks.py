"""Repeated blocks of a model: found in the graphs, translated once, and right under every transformation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import jtbridge
from jtbridge.errors import ArgumentError
from jtbridge.translate._interpret import Interpretation
from tests.compare import assert_close, assert_matches

WAYS = ["call", "scan"]
X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


class Block(nn.Module):
    def __init__(self, size: int, dropout: float = 0.0, factor: float = 1.0):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)
        self.dropout = nn.Dropout(dropout)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self.up(self.norm(x)))
        inner = torch.softmax(inner, -1) * inner + torch.tanh(inner) * torch.sigmoid(inner)
        return x + self.dropout(self.down(inner)) * self.factor


class Tower(nn.Module):
    def __init__(self, *blocks: nn.Module, size: int = 6):
        super().__init__()
        self.first = nn.Linear(3, size)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(size, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def tower(count: int = 4, **options: Any) -> Tower:
    torch.manual_seed(0)
    return Tower(*(Block(6, **options) for _ in range(count)))


def loss(net: Any, params: Any, state: Any, x: Any, **options: Any) -> Any:
    return jnp.sum(net(params, state, x, **options)[0] ** 2)


def assert_trains_like_torch(model: nn.Module, way: str) -> None:
    """Assert that the result and all gradients under `jit` are torch's."""
    net = jtbridge.module(model, repeated_blocks=way)
    params, state = net.init()
    value, gradients = jax.jit(jax.value_and_grad(lambda p: loss(net, p, state, X)))(params)
    model.eval()
    expected = (model(torch.from_numpy(X)) ** 2).sum()
    assert_matches(value, expected)
    names = dict(model.named_parameters())
    assert_matches(gradients, dict(zip(names, torch.autograd.grad(expected, list(names.values())), strict=True)))


def program(model: nn.Module, way: str, *, gradient: bool = False) -> str:
    """Return the program of a model, or of its gradient, before XLA compiles it."""
    net = jtbridge.module(model, repeated_blocks=way)
    params, state = net.init()
    run = (lambda p: jax.grad(lambda p: loss(net, p, state, X))(p)) if gradient else (lambda p: net(p, state, X)[0])
    return jax.jit(run).lower(params).as_text()


@pytest.mark.parametrize("way", ["inline", *WAYS])
def test_result_and_gradients_match_torch(way: str):
    assert_trains_like_torch(tower(), way)


def test_blocks_of_the_forward_and_of_the_backward_are_one_function_each():
    text = program(tower(), "call")
    assert text.count("func.func private @block") == 1
    assert text.count("call @block") == 4
    text = program(tower(), "call", gradient=True)
    assert text.count("func.func private @block") == 2
    assert text.count("call @block") == 8


def test_a_program_with_a_scan_has_one_loop_in_each_direction():
    assert program(tower(), "scan").count("stablehlo.while") == 1
    assert program(tower(), "scan", gradient=True).count("stablehlo.while") == 2
    assert program(tower(), "inline").count("stablehlo.while") == 0


def test_scan_program_size_is_independent_of_the_number_of_blocks():
    few, many = (program(tower(count), "scan").count("dot_general") for count in (4, 9))
    assert few == many < program(tower(9), "inline").count("dot_general")


@pytest.mark.parametrize("way", WAYS)
def test_called_blocks_compile_to_the_same_program(way: str):
    model = tower()
    results = []
    for each in ("inline", way):
        net = jtbridge.module(model, repeated_blocks=each)
        params, state = net.init()
        results.append(jax.jit(jax.grad(lambda p, net=net, state=state: loss(net, p, state, X)))(params))
    inline, repeated = results
    for name in inline:
        if way == "call":
            np.testing.assert_array_equal(repeated[name], inline[name])
        else:
            assert_close(repeated[name], inline[name])


@pytest.mark.parametrize("way", WAYS)
def test_each_block_draws_its_own_dropout_mask(way: str):
    model = tower(dropout=0.5)
    results = []
    for each in ("inline", way):
        net = jtbridge.module(model, repeated_blocks=each)
        params, state = net.init()
        step = jax.jit(lambda p, key, net=net, state=state: net(p, state, X, train=True, rng=key)[0])
        results.append([step(params, jax.random.key(seed)) for seed in (1, 2)])
        grad = jax.jit(jax.grad(lambda p, key, net=net, s=state: loss(net, p, s, X, train=True, rng=key)))
        results[-1].append(grad(params, jax.random.key(1)))
    inline, repeated = results
    jax.tree.map(assert_close, repeated, inline)
    assert not np.allclose(inline[0], inline[1])


@pytest.mark.parametrize("way", WAYS)
def test_transformations_of_repeated_blocks(way: str):
    model = tower(3)
    net, plain = jtbridge.module(model, repeated_blocks=way), jtbridge.module(model, repeated_blocks="inline")
    params, state = net.init()
    direction = jax.tree.map(jnp.cos, params)
    rows = np.stack([X, 2 * X])
    stacked = jax.tree.map(lambda p: jnp.stack([p, 1.5 * p]), params)

    def results(net: Any) -> Any:
        def f(p: Any, x: Any) -> Any:
            return loss(net, p, state, x)

        return (
            jax.jvp(lambda p: f(p, X), (params,), (direction,)),
            jax.vmap(f, (None, 0))(params, rows),
            jax.vmap(jax.grad(f))(stacked, rows),
            jax.jvp(jax.grad(lambda p: f(p, X)), (params,), (direction,))[1],
            jax.grad(jax.checkpoint(f))(params, X),
            jax.grad(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable))(params, X),
        )

    actual, expected = (jax.jit(lambda net=net: results(net))() for net in (net, plain))
    jax.tree.map(lambda a, e: assert_close(a, e, 1e-4), actual, expected)


class Cross(Tower):
    """Every block also gets the result of the first one, and blocks that are two apart are connected."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        seen = [self.blocks[0](x)]
        for block in self.blocks[1:]:
            seen.append(block(seen[-1]) + seen[0] + seen[max(0, len(seen) - 2)])
        return self.last(seen[-1] * seen[2])


class Counted(Tower):
    """Blocks that differ in a number that they compute with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x) + (-0.0 if number == 2 else 0.0) + number
        return self.last(x)


class Constants(Tower):
    """Blocks that use a tensor made inside, which differs from block to block, and one that does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x) * torch.tensor([1.0, 2, 3, 4, 5, 6 + number]) + torch.arange(6)
        return self.last(x)


class Collecting(Tower):
    """The results of all blocks are used at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        states = [x := block(x) for block in self.blocks]
        return self.last(torch.stack(states).prod(0)) + self.last(states[1])


def shared(count: int = 4) -> Tower:
    torch.manual_seed(0)
    return Tower(*[Block(6)] * count)


def alternating() -> Tower:
    torch.manual_seed(0)
    return Tower(*(Block(6, factor=1.0 + number % 2) for number in range(8)))


def of_two_sizes() -> nn.Module:
    torch.manual_seed(0)
    towers = Tower(*(Block(6) for _ in range(4))), Tower(*(Block(8) for _ in range(3)), size=8)
    return nn.Sequential(towers[0], nn.Linear(2, 3), towers[1])


def of(kind: type[Tower]) -> Tower:
    torch.manual_seed(0)
    return kind(*(Block(6) for _ in range(5)))


MODELS = {
    "connected across blocks": lambda: of(Cross),
    "other numbers": lambda: of(Counted),
    "other constants": lambda: of(Constants),
    "all results used": lambda: of(Collecting),
    "shared weights": shared,
    "alternating": alternating,
    "two sizes": of_two_sizes,
    "two blocks": lambda: tower(2),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_blocks_with_differences(name: str, way: str):
    assert_trains_like_torch(MODELS[name](), way)


@pytest.mark.parametrize(
    ("name", "loops"), {"other numbers": 0, "shared weights": 1, "alternating": 1, "two sizes": 2}.items()
)
def test_which_blocks_are_repeated(name: str, loops: int):
    assert program(MODELS[name](), "scan").count("stablehlo.while") == loops


@pytest.mark.parametrize("way", WAYS)
def test_buffers_that_blocks_write_to_are_returned(way: str):
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 6), nn.Tanh()) for _ in range(4)
    ]
    model = Tower(*layers)
    net = jtbridge.module(model, repeated_blocks=way)
    params, state = net.init()
    out, changed = jax.jit(lambda p, s: net(p, s, X, train=True))(params, state)
    model.train()
    assert_matches(out, model(torch.from_numpy(X)))
    assert_matches(changed, {name: value for name, value in model.named_buffers() if name in changed})
    assert len(changed) == 12


def test_views_repeated_in_a_backward_are_not_decomposed(monkeypatch: pytest.MonkeyPatch):
    decomposed: list[str] = []
    decompose = Interpretation._decomposed

    def noting(self: Any, node: Any, *rest: Any) -> Any:
        decomposed.append(str(node.target))
        return decompose(self, node, *rest)

    monkeypatch.setattr(Interpretation, "_decomposed", noting)
    net = jtbridge.module(tower(1))
    params, state = net.init()
    jax.jit(jax.grad(lambda p: loss(net, p, state, X[None]))).lower(params)
    assert "aten.reshape.default" not in decomposed


def test_unknown_option_is_refused():
    with pytest.raises(ArgumentError, match="repeated_blocks"):
        jtbridge.module(tower(), repeated_blocks="loop")
