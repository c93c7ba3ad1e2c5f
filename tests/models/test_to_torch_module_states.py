"""Torch modules of JAX models with a state: writes of calls, checkpoints, and `torch.func`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.utils.checkpoint

import jtbridge
from jtbridge.errors import ModelError

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for the libraries


def test_a_state_of_another_structure():
    module = jtbridge.to_torch_module(lambda p, s, x: (x, {"other": x}), {}, {"count": jnp.zeros(())})
    with pytest.raises(ModelError, match="another structure"):
        module(torch.ones(2))


@pytest.mark.parametrize(
    ("state", "new"),
    [
        (jnp.zeros(3), lambda s: s.sum()),
        (jnp.zeros(3, int), lambda s: s + jnp.ones(3)),
        (0, lambda s: s + 1),
    ],
    ids=["shape", "dtype", "number"],
)
def test_a_state_that_the_buffers_cannot_hold(state, new):
    module = jtbridge.to_torch_module(lambda p, s, x: (x, {"s": new(s["s"])}), {}, {"s": state})
    with pytest.raises(ModelError, match="the state"):
        module(torch.ones(2))


def test_a_state_of_a_narrower_dtype():
    module = jtbridge.to_torch_module(lambda p, s, x: (x, {"s": s["s"] + 1.0}), {}, {"s": jnp.zeros(3)})
    module.bfloat16()(torch.ones(2))
    assert module.s.dtype is torch.bfloat16
    assert module.s.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("what", ["attribute", "variable"])
def test_nnx_calls_that_change_more_than_variables(what):
    nnx = pytest.importorskip("flax.nnx", reason="flax is in the environment of make test-models")

    class Net(nnx.Module):
        def __init__(self):
            self.calls = 0

        def __call__(self, x):
            if what == "attribute":
                self.calls += 1
            else:
                self.scale = nnx.Param(jnp.ones(2))
            return x * self.calls

    with pytest.raises(ModelError, match="changes an attribute"):
        jtbridge.to_torch_module(Net())(torch.ones(2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_modules_with_a_state(reentrant: bool):
    def noise(params, key, x):
        return jnp.sin(x * params["w"]) * jax.random.bernoulli(key, 0.5, x.shape), jax.random.split(key)[0]

    def count(params, state, x):
        return jnp.sin(x * params["w"]), state + 1

    def delayed(params, before, x):
        return params["w"] * (x - before) ** 2, x

    x = torch.ones(16, requires_grad=True)
    params = {"w": jnp.ones(16)}
    module = jtbridge.to_torch_module(count, params, jnp.zeros(()))
    torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(x.grad, torch.cos(x.detach()))
    for function, state in ((noise, jax.random.key(0)), (delayed, jnp.zeros(16))):
        module = jtbridge.to_torch_module(function, params, state)
        loss = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant).sum()
        with pytest.raises(ModelError, match="cannot repeat its first call"):
            loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_calls_that_read_a_state_which_another_call_changes(reentrant: bool):
    def read_or_change(params, state, x, change):
        return jnp.sin(x * state), state + 1 if change else state

    module = jtbridge.to_torch_module(read_or_change, {}, jnp.full((), 2.0))
    x = torch.ones(4, requires_grad=True)
    module(x, True)
    torch.utils.checkpoint.checkpoint(module, x, False, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(x.grad, 3 * torch.cos(3 * x.detach()))
    loss = torch.utils.checkpoint.checkpoint(module, x, False, use_reentrant=reentrant).sum()
    module(x, True)
    with pytest.raises(ModelError, match="cannot repeat its first call"):
        loss.backward()


def test_checkpoints_of_batch_norm_of_nnx():
    nnx = pytest.importorskip("flax.nnx", reason="flax is in the environment of make test-models")
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    gradients = []
    for checkpoint in (False, True):
        module = jtbridge.to_torch_module(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
        for train in (True, False):
            module.train(train)
            call = functools.partial(torch.utils.checkpoint.checkpoint, module, use_reentrant=False)
            ((call if checkpoint else module)(x) ** 2).sum().backward()
        gradients.append(module.scale.grad)
    torch.testing.assert_close(*gradients)


def _scale(params, state, x):
    return x * params["w"] * state["by"], {"by": state["by"], "key": state["key"]}


def test_unchanged_state_is_not_written_to_buffers():
    """torch.func and `jtbridge.wrap` refuse writes to a buffer, and batched values cannot be written to one."""
    module = jtbridge.to_torch_module(_scale, {"w": jnp.ones(2)}, {"by": jnp.full(2, 3.0), "key": jax.random.key(0)})
    x = torch.ones(2)
    version = module.by._version
    torch.testing.assert_close(torch.func.grad(lambda x: module(x).sum())(x), torch.full((2,), 3.0))
    torch.testing.assert_close(torch.func.vmap(module)(torch.ones(4, 2)), torch.full((4, 2), 3.0))
    params = {"w": torch.full((2,), 2.0)}
    torch.testing.assert_close(torch.func.functional_call(module, params, (x,)), torch.full((2,), 6.0))
    assert jax.jit(jax.grad(lambda x: jtbridge.wrap(module)(x).sum()))(jnp.ones(2)).tolist() == [3, 3]
    assert module.by._version == version


@pytest.mark.parametrize("train", [False, True])
def test_nnx_under_torch_func(train: bool):
    nnx = pytest.importorskip("flax.nnx", reason="flax is in the environment of make test-models")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(x))

    module = jtbridge.to_torch_module(Net(nnx.Rngs(0))).train(train)
    params = {name: value.detach() for name, value in module.named_parameters()}

    def loss(params, x):
        return torch.func.functional_call(module, params, (x,)).sum()

    if train:  # as torch's own BatchNorm
        with pytest.raises(RuntimeError, match="in-place"):
            torch.func.grad(loss)(params, torch.ones(2, 3))
        return
    examples = torch.randn(5, 1, 3)
    of_each = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, examples)
    loss(dict(module.named_parameters()), examples.reshape(5, 3)).backward()
    torch.testing.assert_close(of_each["norm.scale"].sum(0), module.norm.scale.grad)
