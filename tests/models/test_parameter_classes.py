"""Parameters with additional attributes, and parameters of subclasses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import ModelError

X = jnp.ones(2)


class Scaled(torch.nn.Parameter):
    pass


class Model(torch.nn.Module):
    def __init__(self, parameter: torch.nn.Parameter):
        super().__init__()
        self.weight = parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * getattr(self.weight, "scale", 1)


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("wrap", [lambda call: call, jax.jit], ids=["eager", "jit"])
def test_a_parameter_keeps_its_attributes(wrap, release):
    model = Model(torch.nn.Parameter(torch.ones(2)))
    model.weight.scale = 3.0
    net = jtbridge.module(model)
    params, state = net.init(release=release)
    call = wrap(lambda params: net(params, state, X)[0])
    np.testing.assert_array_equal(call(params), [3, 3])
    np.testing.assert_array_equal(jax.grad(lambda params: call(params).sum())(params)["weight"], [3, 3])
    net.load(params, state)
    assert model.weight.scale == 3.0


@pytest.mark.parametrize("release", [False, True])
def test_a_parameter_of_another_class_is_refused(release):
    net = jtbridge.module(Model(Scaled(torch.ones(2))))
    with pytest.raises(ModelError, match="`weight` of `Model` is a `Scaled`"):
        net.init(release=release)
    plain = jtbridge.module(Model(torch.nn.Parameter(torch.ones(2))))
    params, state = plain.init()
    with pytest.raises(ModelError, match="`weight` of `Model` is a `Scaled`"):
        net(params, state, X)
