"""Kernels on several GPUs, with a collective between them. `test_shard_map.py` tests the same on CPU devices."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .harness import assert_close
from .test_shard_map import CASES, sharded

pytestmark = pytest.mark.gpu


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    if len(gpus) < 2:
        pytest.skip("this machine has no two GPUs")
    return jax.make_mesh((2,), ("i",), devices=gpus[:2], axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_summed_over_gpus(name, mesh, proven):
    loss, x, w, count = CASES[name]
    gradient = jax.jit(jax.value_and_grad(sharded(loss, mesh), (0, 1)))
    apart = jax.device_put(x, NamedSharding(mesh, P("i")))
    same = jax.device_put(w, NamedSharding(mesh, P()))
    text = gradient.lower(apart, same).as_text()
    assert text.count("@triton_kernel_call") == count
    assert "all_reduce" in text
    assert_close(gradient(apart, same), jax.value_and_grad(loss, (0, 1))(x, w), factor=8)
