"""A program of a user with strict type checking: it uses every public function, and all results have known types.

`make lint` checks it by pyright in strict mode. It is not run.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jtbridge
from jtbridge import errors, kernels


def functions(x: jax.Array) -> list[object]:
    @jtbridge.wrap
    def decorated(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    wrapped = jtbridge.wrap(plain, backend="xla", islands="never", verify=True, residuals="recompute")
    statuses: tuple[jtbridge.BackendStatus, ...] = jtbridge.backends("cpu")
    names: list[str] = [status.name for status in statuses if status.available]
    with jtbridge.config(backend="auto", tune=False):
        explanation: jtbridge.Explanation = jtbridge.explain(wrapped, x)
        check: jtbridge.CheckReport = jtbridge.check(wrapped, x)
        purity: jtbridge.PurityReport = jtbridge.purity(wrapped, x)
    exported = jtbridge.export(wrapped, x)
    tensor: torch.Tensor = jtbridge.to_torch(x)
    array: jax.Array = jtbridge.to_jax(tensor)
    return [decorated(x), wrapped(x), names, explanation, check.ok, purity.is_pure, exported, array]


def models(x: jax.Array, mesh: Mesh) -> list[object]:
    net: jtbridge.JaxModule = jtbridge.module(torch.nn.Linear(3, 2))
    params, state = net.init()
    out, state = net(params, state, x)

    def loss(model: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    step: jtbridge.TrainStep = jtbridge.train_step(net, loss, optax.sgd(0.1))
    run: jtbridge.TrainState = step.init(jax.random.key(0))
    layout = jtbridge.shardings(params, mesh, "replicated")
    placed = jtbridge.shard(params, mesh, "replicated")
    batch = jtbridge.shard_batch({"x": x}, mesh)
    tokens = jtbridge.generate(net, params, state, np.ones((1, 3), np.int32), max_new_tokens=2)
    return [out, state, run, layout, placed, batch, tokens, NamedSharding(mesh, PartitionSpec())]


def way_back(x: torch.Tensor) -> list[object]:
    def product(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
        return params["w"] * x

    f = jtbridge.to_torch_function(jnp.sin)
    module: torch.nn.Module = jtbridge.to_torch_module(product, {"w": np.ones(3, np.float32)})
    return [f(x), module(x)]


def reports() -> list[object]:
    doctor: jtbridge.DoctorReport = jtbridge.doctor(["caches"])
    findings: list[str] = [finding.name for finding in doctor.findings]
    first: jtbridge.Finding = doctor.findings[0]
    proof: jtbridge.ProofReport = jtbridge.prove()
    return [doctor.healthy, findings, first.text, proof]


@jtbridge.register_lowering(torch.ops.aten.sin.default)
def lowering(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


def kernel_functions(x: jax.Array) -> jax.Array:
    try:
        return kernels.softmax(x) + kernels.log_softmax(x) + kernels.attention(x, x, x)
    except errors.JtbridgeError:
        return x
