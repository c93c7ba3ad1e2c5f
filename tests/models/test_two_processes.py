"""Two processes with four devices each, as on two machines."""

from __future__ import annotations

import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

pytest.importorskip("transformers")
pytest.importorskip("optax")
ROOT = pathlib.Path(__file__).parent.parent.parent
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if key != "XLA_FLAGS"},
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
}


@pytest.mark.timeout(900)
def test_example_gives_the_same_losses_in_two_processes():
    sizes = ["--width", "32", "--layers", "1", "--steps", "3", "--layouts", "both"]
    done = subprocess.run(
        [sys.executable, "examples/shard_llama.py", *sizes],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = done.stdout.split("Two processes with four devices each")
    losses = [re.search(r"losses (\S+) \.\.\. (\S+)", part) for part in (one, two)]
    assert losses[0]
    assert losses[1]
    first, last = (float(loss) for loss in losses[0].groups())
    assert last < first
    for mine, other in zip(losses[0].groups(), losses[1].groups(), strict=True):
        assert abs(float(mine) - float(other)) <= 2e-4  # the sums have another order, and are printed with four digits
    shares = re.findall(r"a device holds (\S+) of the parameters", done.stdout)
    assert shares == ["0.126", "0.126"]


PROGRAM = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import jtbridge

sgd = optax.sgd(1e-3)
jax.config.update("jax_num_cpu_devices", 4)
folder, address, process = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(process))
mesh = jax.make_mesh((8,), ("data",))
net = jtbridge.module(torch.nn.Linear(16, 8))

# Each process reads its parts of the file, and has its rows of the batch.
params, state = net.load_safetensors(folder, mesh=mesh, rules="fsdp")
assert {x.addressable_shards[0].data.size * 8 for x in params.values()} == {128, 8}
rows = np.arange(256, dtype=np.float32).reshape(16, 16) / 256
mine = rows[:8] if process == "0" else rows[8:]
local = jtbridge.shard_batch(mine, mesh, local=True)
whole = jtbridge.shard_batch(rows, mesh)
run = jax.jit(lambda params, x: (net(params, state, x)[0] ** 2).sum())
print("values", run(params, local), run(params, whole))

# Each device calls torch with its two rows.
called = jtbridge.wrap(lambda x: torch.from_numpy(np.sort(x.numpy(), axis=-1)[:, ::-1].copy()), batched="x")
program = jax.jit(lambda x: jnp.cos(called(x)).sum()).lower(whole).compile()
assert "all-gather" not in program.as_text()
print("called", program(whole))

# An ordinary key, which is on one device of each process, goes to all devices.
step = jtbridge.train_step(net, lambda model, x: (model(x) ** 2).sum(), sgd)
for rules in ("fsdp", "replicated"):
    train = step.init(jax.random.key(0), *net.load_safetensors(folder, mesh=mesh, rules=rules))
    losses = []
    for _ in range(2):
        train, metrics = step(train, whole)
        losses.append(metrics["loss"].item())
    print("losses", rules, *losses)
weights = net.state_dict(train.params, train.state)  # replicated: each process has them whole
assert torch.equal(weights["weight"], torch.from_numpy(np.asarray(train.params["weight"])))
placed = jtbridge.shard({"key": jax.random.key(3)}, mesh, "replicated")["key"]
assert placed.sharding.is_fully_replicated
assert len(placed.sharding.device_set) == 8

try:
    net.state_dict(params, state)
except jtbridge.errors.DeviceError as error:
    print("refused", "process_allgather" in str(error))
"""


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
def test_processes_read_their_parts_and_call_torch_with_their_rows(tmp_path):
    import numpy as np
    import torch

    import jtbridge

    torch.manual_seed(0)
    model = torch.nn.Linear(16, 8)
    net = jtbridge.module(model)
    net.save_safetensors(tmp_path / "model.safetensors", *net.init())
    x = np.arange(256, dtype=np.float32).reshape(16, 16) / 256
    loss = (model(torch.tensor(x)) ** 2).sum()
    loss.backward()
    expected = loss.item()
    torch.optim.SGD(model.parameters(), 1e-3).step()
    after_one_step = (model(torch.tensor(x)) ** 2).sum().item()

    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), address]
    processes = [
        subprocess.Popen(
            [*command, str(number)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        for number in range(2)
    ]
    try:
        for process in processes:
            out, errors = process.communicate(timeout=280)
            assert process.returncode == 0, errors[-3000:]
            values = re.search(r"^values (\S+) (\S+)$", out, re.MULTILINE)
            called = re.search(r"^called (\S+)$", out, re.MULTILINE)
            losses = re.findall(r"^losses \S+ (\S+) (\S+)$", out, re.MULTILINE)
            assert len(losses) == 2
            np.testing.assert_allclose(np.array(losses, float), [[expected, after_one_step]] * 2, rtol=1e-5)
            assert values
            assert called
            assert "refused True" in out
            np.testing.assert_allclose([float(value) for value in values.groups()], expected, rtol=1e-5)
            np.testing.assert_allclose(float(called[1]), np.cos(x).sum(), rtol=1e-5)
    finally:
        for process in processes:
            process.kill()
