"""`jtbridge.module` with optax, peft and equinox. `make test-models` installs them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
modes = pytest.mark.parametrize("mode", ["eager", "jit"])
X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = (X[:, :1] * X[:, 1:2]).astype(np.float32)


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


@modes
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", ["adamw", "accumulated", "finite", "masked"])
def test_optax(name: str, mode: str):
    optax = pytest.importorskip("optax")
    optimizer = {
        "adamw": lambda: optax.adamw(0.01, weight_decay=0.1),
        "accumulated": lambda: optax.MultiSteps(optax.adamw(0.01, weight_decay=0.1), every_k_schedule=2),
        "finite": lambda: optax.apply_if_finite(optax.adamw(0.01, weight_decay=0.1), 3),
        "masked": lambda: optax.adamw(0.01, weight_decay=0.1, mask=lambda p: {name: p[name].ndim > 1 for name in p}),
    }[name]()
    net = jtbridge.module(mlp())
    params, state = net.init()

    def loss(params: Any, state: Any) -> Any:
        out, changed = net(params, state, X, train=True)
        return ((out - Y) ** 2).mean(), changed

    def step(params: Any, state: Any, opt_state: Any) -> Any:
        (value, changed), gradients = jax.value_and_grad(loss, has_aux=True)(params, state)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), changed, opt_state, value

    step = jax.jit(step) if mode == "jit" else step
    opt_state = optimizer.init(params)
    for _ in range(4):
        params, changed, opt_state, _ = step(params, state, opt_state)
        state = state | changed

    reference = mlp().train()
    named = dict(reference.named_parameters())
    decayed = [p for p in named.values() if name != "masked" or p.ndim > 1]
    others = [p for p in named.values() if name == "masked" and p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    torchs = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)
    for number in range(4):
        scale = 0.5 if name == "accumulated" else 1.0
        (scale * ((reference(torch.from_numpy(X)) - torch.from_numpy(Y)) ** 2).mean()).backward()
        if name != "accumulated" or number % 2:
            torchs.step()
            torchs.zero_grad()
    for key, p in named.items():  # a step of Adam has the size of the learning rate, whatever rounding the gradient has
        np.testing.assert_allclose(params[key], p.detach(), rtol=1e-3, atol=1e-4 if key != "0.bias" else 0.05)
    np.testing.assert_allclose(state["1.running_var"], reference[1].running_var, rtol=1e-3)


def test_equinox():
    eqx = pytest.importorskip("equinox")
    net = jtbridge.module(mlp())

    class Model(eqx.Module):
        params: dict[str, jax.Array]
        state: dict[str, jax.Array]
        scale: jax.Array
        net: Any = eqx.field(static=True)

        def __call__(self, x: Any) -> Any:
            return self.scale * self.net(self.params, self.state, x)[0]

    model = Model(*net.init(), jnp.ones(()), net)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model: Any, x: Any) -> Any:
        return (model(x) ** 2).mean()

    found = gradient(model, X)
    reference = mlp().eval()
    (reference(torch.from_numpy(X)) ** 2).mean().backward()
    np.testing.assert_allclose(found.params["0.weight"], reference[0].weight.grad, rtol=1e-4, atol=1e-6)
    assert found.scale.shape == ()


@modes
def test_adapters_of_peft(mode: str):
    peft = pytest.importorskip("peft")
    from tests.models.test_transformers import PROMPT, caller, close, llama

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), config).eval()
    net = jtbridge.module(model)
    params, state = net.init()
    assert params
    assert all("lora_" in name for name in params)
    assert not any("lora_" in name for name in state)

    def loss(params: Any, state: Any) -> Any:
        return net(params, state, input_ids=PROMPT, labels=PROMPT)[0].loss

    step = jax.value_and_grad(loss)
    value, gradients = (jax.jit(step) if mode == "jit" else step)(params, state)
    ids = torch.from_numpy(PROMPT)
    expected = model(input_ids=ids, labels=ids)
    expected.loss.backward()
    np.testing.assert_allclose(value, expected.loss.detach(), rtol=1e-5)
    for name, p in model.named_parameters():
        if p.requires_grad:
            close(gradients[name], p.grad)
    with model.disable_adapter():
        call = caller(net, mode)
        close(call(params, state, {"input_ids": PROMPT}).logits, model(input_ids=ids).logits)
    assert list(net.state_dict(params, state)) == list(model.state_dict())


def test_first_call_of_a_process_may_be_jitted():
    """jtbridge replaces a function of transformers, which does not count as state that the call writes."""
    pytest.importorskip("peft")
    code = (
        "import jax, jax.numpy as jnp, peft, jtbridge\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,"
        " num_attention_heads=2)\n"
        "lora = peft.LoraConfig(r=2, target_modules=['q_proj'])\n"
        "net = jtbridge.module(peft.get_peft_model(LlamaForCausalLM(config), lora))\n"
        "out, _ = jax.jit(net)(*net.init(), input_ids=jnp.zeros((1, 3), int))\n"
        "print(out.logits.shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "(1, 3, 8)", done.stderr
