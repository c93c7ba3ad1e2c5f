"""Runs of `jtbridge.train_step` that orbax saves, and that resume bit for bit. `make test-models` installs orbax."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch import nn

import jtbridge

ocp = pytest.importorskip("orbax.checkpoint")
optax = pytest.importorskip("optax")
pytestmark = pytest.mark.usefixtures("standard_promotion")
BATCH = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)

RUN = """
import os, pathlib, signal, sys, zlib
import jax, jax.numpy as jnp, numpy as np, optax, orbax.checkpoint as ocp, torch
import jtbridge

folder, killed_at = pathlib.Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
net = jtbridge.module(torch.nn.Sequential(*layers))
step = jtbridge.train_step(net, lambda model, x: jnp.mean((model(x) - 1) ** 2), optax.adamw(0.01), accumulate=2)
options = ocp.CheckpointManagerOptions(save_interval_steps=2, max_to_keep=2)
with ocp.CheckpointManager(folder, options=options) as manager:
    train = step.init(jax.random.key(0))
    if manager.latest_step() is not None:
        train = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(train))
        print("resumed", train.step)
    while train.step < 8:
        batch = jax.random.normal(jax.random.fold_in(jax.random.key(1), train.step), (8, 4))
        train, metrics = step(train, batch)
        manager.save(int(train.step), args=ocp.args.StandardSave(train))
        if train.step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
arrays = jax.tree.leaves((train.params, train.state, train.opt_state, metrics))
print("end", train.step, zlib.crc32(b"".join(np.asarray(array).tobytes() for array in arrays)))
"""


def test_killed_run_ends_with_identical_results(tmp_path: pathlib.Path):
    def run(folder: str, killed_at: int) -> tuple[int, list[str]]:
        command = [sys.executable, "-c", RUN, str(tmp_path / folder), str(killed_at)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
        return done.returncode, done.stdout.split()

    _, unbroken = run("unbroken", 0)
    assert unbroken[:2] == ["end", "8"]
    assert run("killed", 5) == (-signal.SIGKILL, [])
    _, resumed = run("killed", 0)
    assert resumed[0] == "resumed"
    assert resumed[1] in ("2", "4")  # the save of step 4 may be under way when the process is killed
    assert resumed[2:] == unbroken


def small() -> tuple[Any, Any]:
    torch.manual_seed(0)
    net = jtbridge.module(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)))
    return net, jtbridge.train_step(net, lambda model, x: jnp.mean((model(x) - 1) ** 2), optax.adamw(0.01))


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(jax.random.key_data(x) if _is_key(x) else x).tobytes() for x in jax.tree.leaves(tree)]


def _is_key(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def test_steps_may_continue_while_a_checkpoint_is_written(tmp_path: pathlib.Path):
    _, step = small()
    train, _ = step(step.init(jax.random.key(0)), BATCH)
    expected = bits(train)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", train)
        for _ in range(3):
            train, _ = step(train, BATCH)  # donates the arrays that are being written
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "run", step.init(jax.random.key(7)))
    assert isinstance(restored, jtbridge.TrainState)
    assert bits(restored) == expected
    for _ in range(3):
        restored, _ = step(restored, BATCH)
    assert bits(restored) == bits(train)


def test_a_sharded_run_is_restored_with_its_shardings(tmp_path: pathlib.Path):
    net, step = small()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))

    def start() -> Any:
        params, state = net.init()
        params = {name: jax.device_put(p, rows if p.shape[0] == 8 else whole) for name, p in params.items()}
        return step.init(jax.random.key(0), params, jax.device_put(state, whole))

    batch = jax.device_put(BATCH, rows)
    train, _ = step(start(), batch)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", train)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "run", start())
    assert restored.params["0.weight"].sharding == rows
    assert restored.opt_state[0].mu["0.weight"].sharding == rows
    assert bits(restored) == bits(train)
    assert bits(step(restored, batch)) == bits(step(train, batch))
