"""Ctrl-C: in an eager call, while JAX traces, in the first imports of torch's compiler, and in a compiled program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.core import imports

X = jnp.ones(4)
BACKENDS = ("auto", "dlpack", "callback")


class Slow:
    """A function that takes three seconds, or no time."""

    is_slow = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(300 * self.is_slow):
            time.sleep(0.01)
        return x * 2


@pytest.fixture(autouse=True)
def takes_interrupts() -> Iterator[None]:
    """Handle the signal, which a command that a shell starts in the background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupt() -> Iterator[threading.Timer]:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    yield timer
    timer.cancel()


@pytest.mark.parametrize("how", ["eager", "gradient", "jit", "jit of a gradient"])
@pytest.mark.parametrize("name", ["xla", *BACKENDS])
def test_interrupt_in_a_long_function(interrupt: threading.Timer, how: str, name: str):
    slow = Slow()
    f = jtbridge.wrap(slow, backend=name)
    run = jax.grad(lambda x: f(x).sum()) if "gradient" in how else f
    run = jax.jit(run) if "jit" in how else run
    jax.block_until_ready(jtbridge.wrap(torch.sin, backend=name)(X))  # so that imports and locks are not interrupted
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        run(X)
    slow.is_slow = False
    np.testing.assert_array_equal(run(X), np.full(4, 2.0))


@pytest.mark.parametrize("name", ["dlpack", "callback"])
def test_interrupt_in_a_compiled_program(interrupt: threading.Timer, name: str):
    """XLA passes on only the text of an exception."""
    slow = Slow()
    slow.is_slow = False

    def opaque(x: torch.Tensor) -> torch.Tensor:
        return slow(x) if x.numpy().any() else x

    run = jax.jit(jtbridge.wrap(opaque, backend=name))
    jax.block_until_ready(run(X))
    slow.is_slow = True
    interrupt.start()
    try:
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"`opaque`.* raised KeyboardInterrupt"):
            jax.block_until_ready(run(X))
    except KeyboardInterrupt:  # the program ran on a thread of XLA, and this thread waited
        pass
    slow.is_slow = False
    np.testing.assert_array_equal(run(X), np.full(4, 2.0))


FRESH = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp, torch, jtbridge
x = jnp.ones(4)
def use():
    f = jtbridge.wrap(lambda v: torch.nn.functional.gelu(v).sum(), backend=sys.argv[2])
    return float(jax.jit(f)(x)), float(jax.jit(jax.grad(f))(x)[0]), float(jax.jit(jax.vmap(f))(x[None])[0])
threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    while True:
        use()
except KeyboardInterrupt:
    print(*use())
"""


@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.4, 0.6, 0.9, 1.3, 1.8])
def test_interrupt_in_the_first_use_of_a_process(seconds: float):
    """An interrupted import would leave modules that fail in every later use."""
    arguments = [sys.executable, "-c", FRESH, str(seconds), "auto"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    x = torch.ones(4, requires_grad=True)
    value = torch.nn.functional.gelu(x).sum()
    (slope,) = torch.autograd.grad(value, x)
    np.testing.assert_allclose([*map(float, done.stdout.split())], [value.item(), slope[0].item(), value.item()], 1e-6)


REGISTERING = """
import sys, threading, time, _thread
import jax, jax.numpy as jnp, torch, jtbridge
seen = []
def interrupt(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "register" and "_registry" in frame.f_code.co_filename:
        seen.append(frame)
        if len(seen) == 100:
            _thread.interrupt_main()
            time.sleep(0.1)
f = jax.jit(jtbridge.wrap(lambda x: x.sin()))
threading.setprofile(interrupt)
sys.setprofile(interrupt)
try:
    f(jnp.ones(3))
except KeyboardInterrupt:
    print("interrupted", f(jnp.zeros(3)).tolist())
"""


def test_interrupt_while_lowerings_are_registered():
    """A lowering that is registered again is refused, so these modules must not be imported twice."""
    done = subprocess.run([sys.executable, "-c", REGISTERING], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "interrupted [0.0, 0.0, 0.0]\n"


def test_only_the_first_functions_of_a_process_import(monkeypatch: pytest.MonkeyPatch):
    def use() -> None:
        f = jtbridge.wrap(lambda x: x.sin().sum())
        np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(f)))(jnp.zeros((2, 3))), 1)

    use()
    monkeypatch.setattr(imports, "run_imports", lambda function: pytest.fail("modules are imported again"))
    use()
