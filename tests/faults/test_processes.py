"""Forked and spawned processes, workers of a DataLoader, and the end of a process with calls in flight."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import multiprocessing, os, sys, threading, time, warnings
import jax, jax.numpy as jnp, numpy as np, torch, jtbridge
warnings.filterwarnings("ignore", message="os.fork")
doubled = jtbridge.wrap(lambda x: x * 2)
from_jax = jtbridge.to_torch_function(lambda x: x * 2)
called = jtbridge.wrap(lambda x: x * 2, backend="dlpack")
"""
# Programs that print the values that the test compares.
PROGRAMS = {
    "a fork of a process that has not used JAX": (
        """
        child = os.fork()
        if not child:
            print(*doubled(jnp.ones(1)), *jax.jit(doubled)(jnp.ones(1)), *jax.jit(called)(jnp.ones(1)), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        """,
        "2.0 2.0 2.0",
    ),
    "a fork of a process that has used JAX": (
        """
        x = doubled(jnp.ones(4))
        child = os.fork()
        if not child:
            for call in (lambda: doubled(x), lambda: jax.jit(lambda y: doubled(y))(x), lambda: called(x),
                         lambda: jax.grad(lambda y: doubled(y).sum())(x), lambda: from_jax(torch.ones(4))):
                try:
                    call()
                except jtbridge.errors.ForkError as error:
                    print("spawn" in str(error), end=" ", flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(*doubled(jnp.ones(1)), *jax.jit(doubled)(jnp.ones(1)))
        """,
        "True True True True True 2.0 2.0",
    ),
    "workers that fork, beside a jitted loop": (
        """
        step = jax.jit(lambda x: doubled(x) + called(x))
        data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(16, 4))
        total = 0.0
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2):
            total += float(step(jnp.asarray(batch.numpy())).sum())
        print(total)
        """,
        "8064.0",
    ),
    "the process ends while another thread is in a program": (
        """
        def slow(x):
            time.sleep(3)
            return x * 2
        for backend in ("dlpack", "callback"):
            run = jax.jit(jtbridge.wrap(slow, backend=backend))
            compiled = run.lower(jnp.ones(4)).compile()
            threading.Thread(target=lambda: jax.block_until_ready(compiled(jnp.ones(4))), daemon=True).start()
        time.sleep(0.5)
        print("end")
        """,
        "end",
    ),
    "the process ends while another thread waits for ever in a program": (
        """
        def waits(x):
            if not isinstance(x, torch._subclasses.FakeTensor) and started.is_set():
                threading.Event().wait()
            return x * 2
        started = threading.Event()
        compiled = jax.jit(jtbridge.wrap(waits, backend="dlpack")).lower(jnp.ones(4)).compile()
        started.set()
        threading.Thread(target=lambda: jax.block_until_ready(compiled(jnp.ones(4))), daemon=True).start()
        time.sleep(0.5)
        print("end")
        """,
        "end",
    ),
    "the process ends with results that are not ready": (
        """
        def slow(x):
            time.sleep(0.2)
            return x * 2
        for backend in ("dlpack", "callback"):
            run = jax.jit(jtbridge.wrap(slow, backend=backend))
            x = jnp.ones(1_000_000)
            results = [run(run(x)) for _ in range(3)]
        print("end")
        """,
        "end",
    ),
    "check in a fork": (
        """
        wrapped = jtbridge.wrap(torch.sin)
        wrapped(jnp.ones(2))
        child = os.fork()
        if not child:
            try:
                jtbridge.check(wrapped, jnp.ones(2))
            except jtbridge.errors.ForkError as error:
                print("`sin` is called in a process that was forked" in str(error), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        """,
        "True",
    ),
    "a first trace after the main thread has ended": (
        """
        def work():
            threading.main_thread().join()
            print(*jax.jit(jtbridge.wrap(torch.Tensor.double))(jnp.ones(2)))
        threading.Thread(target=work).start()
        """,
        "1.0 1.0",
    ),
    "a first trace when Python has ended": (
        """
        import atexit
        atexit.register(lambda: print(*jax.jit(doubled)(jnp.ones(2))))
        """,
        "2.0 2.0",
    ),
    "an exception whose text is no UTF-8": (
        """
        def fails(x):
            if float(x.sum()) < 0:
                raise ValueError("file a\\ud800b and a NUL: \\0 here")
            return x * 2
        for backend in ("auto", "dlpack", "callback"):
            call = jax.jit(jtbridge.wrap(fails, backend=backend))
            try:
                jax.block_until_ready(call(-jnp.ones(2)))
            except Exception as error:
                print("a\\\\ud800b and a NUL: \\\\x00 here" in str(error))
            print(*call(jnp.ones(2)))
        """,
        "True 2.0 2.0 " * 3,
    ),
    "the process ends while another thread traces": (
        """
        def slow(x):
            time.sleep(3)
            return x * 2
        threading.Thread(target=lambda: jax.jit(jtbridge.wrap(slow))(jnp.ones(4)), daemon=True).start()
        time.sleep(2)
        print("end")
        """,
        "end",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_fork_and_exit(name: str):
    program, expected = PROGRAMS[name]
    arguments = [sys.executable, "-c", PRELUDE + textwrap.dedent(program)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == expected.split()


SPAWN = """
import multiprocessing
import jax, jax.numpy as jnp, torch, jtbridge

doubled = jtbridge.wrap(torch.Tensor.double)

@jtbridge.wrap
def tripled(x):
    return x * 3

class Tripled(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return float(jax.jit(tripled)(jnp.full(2, index))[0])

def main():
    context = multiprocessing.get_context("spawn")
    jax.block_until_ready(jax.jit(tripled)(jnp.ones(2)))
    with context.Pool(1) as pool:
        print(*pool.apply(tripled, (jnp.ones(2),)), end=" ")
    loader = torch.utils.data.DataLoader(Tripled(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    print(*(float(batch.sum()) for batch in loader))

if __name__ == "__main__":
    main()
"""


def test_spawned_processes(tmp_path):
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["3.0", "3.0", "18.0", "66.0"]


def test_end_of_busy_processes_waits_for_other_threads():
    """The interpreter then takes seconds to end, and a thread comes back to Python in this time."""
    program, _ = PROGRAMS["the process ends while another thread is in a program"]
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(program)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) for _ in range(4)]
    for process in processes:
        _, messages = process.communicate(timeout=120)
        assert process.returncode == 0, messages[-3000:]
