"""Another thread that uses torch is not affected while jtbridge traces, compiles and runs."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import jtbridge

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]
DRAWS, ROUND = 100_000, 50  # numbers that the other thread draws, and how many of them in one round
KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


class Dropping(torch.nn.Module):
    """A network with dropout, part of which is recomputed in the backward."""

    def __init__(self, use_reentrant: bool):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def block(x: torch.Tensor) -> torch.Tensor:
            return F.dropout(torch.tanh(self.first(x)), 0.5)

        return self.second(checkpoint(block, x, use_reentrant=self.use_reentrant)).sum()


def gradient_with_checkpoint() -> Callable[[torch.Tensor], torch.Tensor]:
    """Differentiate inside the function, so that the recomputation is a part of it."""
    model = Dropping(False)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(model(x), x)[0]

    return run


def reseeding(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return x * torch.randn(4)


def failing(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("this function fails", x.shape)


def reading(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum().item() > -100 else x


def drawing_opaquely(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5) if x.sum().item() > -100 else x


def warning(x: torch.Tensor) -> torch.Tensor:
    return x.new_tensor(np.array([1.0], np.float32)) + x


LSTM = torch.nn.LSTM(4, 3, batch_first=True)
CONVOLUTION = torch.nn.Conv1d(3, 2, 2)
ENCODER = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
BATCH_NORM = torch.nn.BatchNorm1d(4).eval()

PURE: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.sin() * x,
    lambda x: torch.ones(4) / 3 * x,
    lambda x: F.softmax(x, -1) @ x.T,
    lambda x: LSTM(x[None])[0],
    lambda x: CONVOLUTION(x[None]),
    lambda x: ENCODER.eval()(x[None]),
    lambda x: BATCH_NORM(x),
    warning,
]
DRAWING: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: F.dropout(x, 0.5),
    lambda x: x * torch.randn(4) + torch.rand(3, 1),
    lambda x: torch.bernoulli(torch.sigmoid(x)) * x,
    Dropping(True),
    Dropping(False),
    drawing_opaquely,
]


def work() -> list[Callable[[], Any]]:
    """Return fifty jobs of all kinds; some of them raise."""
    jobs: list[Callable[[], Any]] = []
    for backend in ("auto", "xla", "dlpack"):
        for fn in PURE:
            f = jtbridge.wrap(fn, backend=backend)
            jobs.append(lambda f=f: jax.jit(f)(X))
        for fn in DRAWING:
            if fn is drawing_opaquely and backend == "xla":
                continue
            f = jtbridge.wrap(fn, backend=backend)
            jobs.append(lambda f=f: jax.jit(lambda x, key: f(x, rng=key))(X, KEY))
    for fn in (PURE[0], PURE[3], PURE[5]):
        f = jtbridge.wrap(fn, backend="dlpack")
        jobs.append(lambda f=f: jax.jit(jax.grad(lambda x: f(x).sum()))(X))
    f = jtbridge.wrap(Dropping(False))  # torch.autograd.grad takes no reentrant checkpoint
    jobs.append(lambda: jax.jit(jax.grad(lambda x: f(x, rng=KEY)))(X))
    g = jtbridge.wrap(gradient_with_checkpoint(), backend="dlpack")
    jobs.append(lambda: jax.jit(lambda x: g(x, rng=KEY))(X))
    reseeded = jtbridge.wrap(reseeding, backend="dlpack")
    jobs.append(lambda: jax.jit(lambda x: reseeded(x, rng=KEY))(X))
    jobs.append(lambda: jax.jit(jtbridge.wrap(failing))(X))
    jobs.append(lambda: jax.jit(jtbridge.wrap(reading, backend="dlpack"))(X))
    jobs.append(lambda: jax.jit(jtbridge.wrap(drawing_opaquely, backend="dlpack"))(X))  # without a key
    ordered = jtbridge.wrap(lambda x: x + 1, effects="ordered")
    jobs.append(lambda: jax.jit(ordered)(X))
    batched = jtbridge.wrap(lambda x: torch.cumsum(x, 0) * torch.tanh(x), backend="dlpack")
    jobs.append(lambda: jax.jit(jax.vmap(batched))(X))
    return jobs


class Other:
    """A thread that uses torch without jtbridge, and records its observations in rounds."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.image = torch.randn(1, 3, 9, 9, generator=generator)
        self.convolution = torch.nn.Conv2d(3, 4, 3)
        for parameter in self.convolution.parameters():
            parameter.data.normal_(generator=generator)
        self.hooked: list[str] = []
        self.convolution.register_forward_hook(lambda *_: self.hooked.append("after"))
        self.convolution.register_forward_pre_hook(lambda *_: self.hooked.append("before"))
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True).eval()
        for parameter in self.attention.parameters():
            parameter.data.normal_(generator=generator)

    def round(self, number: int) -> tuple[Any, ...]:
        with torch.set_grad_enabled(number % 2 == 0):
            drawn = torch.rand(ROUND)
            grad = torch.is_grad_enabled()
            dropped = F.dropout(torch.ones(8), 0.5)
            convolved = self.convolution(self.image)
            attended = self.attention(self.image[0, :, :4, :4], self.image[0, :, :4, :4], self.image[0, :, :4, :4])[0]
        modules = torch.nn.modules.module
        values = tuple(x.detach().numpy().tobytes() for x in (drawn, dropped, convolved, attended))
        flags = (
            grad,
            torch.empty(1).dtype,
            (torch.arange(3) / 2).dtype,
            torch.empty(1).device,
            torch.get_default_dtype(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.backends.mkldnn.enabled,
            torch.backends.mkldnn.is_available(),
            torch.backends.mha.get_fastpath_enabled(),
            torch.get_float32_matmul_precision(),
            torch.compiler.is_exporting(),
            torch.compiler.is_compiling(),
            torch.fx._symbolic_trace.is_fx_symbolic_tracing(),
            torch._dynamo.config.disable,
            torch._dynamo.config.error_on_nested_fx_trace,
            torch.overrides._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
            torch.get_rng_state().numpy().tobytes(),
            torch.initial_seed(),
        )
        logged = _LOGGER.isEnabledFor(logging.ERROR) and not _LOGGER.disabled
        seen = _LOGGER.filter(logging.LogRecord("a", logging.ERROR, "", 0, "", (), None))
        hooks = (
            len(modules._global_forward_hooks),
            len(modules._global_forward_pre_hooks),
            len(modules._global_backward_hooks),
            torch.nn.Module.__call__,
            torch.nn.Module.__getattr__,
            tuple(self.hooked),
        )
        self.hooked.clear()
        return (*values, *flags, logged, bool(seen), *hooks, tuple(map(str, warnings.filters)), warnings.showwarning)


def rounds(other: Other, count: int) -> list[tuple[Any, ...]]:
    torch.manual_seed(11)
    return [other.round(number) for number in range(count)]


def test_other_threads_are_unaffected():
    """It runs while fifty functions are traced, compiled and run."""
    import torch._dynamo

    count = DRAWS // ROUND
    alone = rounds(Other(), count)
    found: list[tuple[Any, ...]] = []
    jobs, outcomes = work(), []
    other, started, done = Other(), threading.Event(), threading.Event()
    torch.manual_seed(11)

    def trace_and_run() -> None:
        started.wait()
        for job in jobs:
            try:
                jax.block_until_ready(job())
                outcomes.append("ran")
            except Exception as error:  # noqa: BLE001  (what fails is to leave no trace as well)
                outcomes.append(type(error).__name__)
        done.set()

    thread = threading.Thread(target=trace_and_run)
    thread.start()
    started.set()
    pause = threading.Event()
    for number in range(count):
        found.append(other.round(number))
        if not done.is_set():
            pause.wait(0.01)  # so that the rounds last as long as the work
    thread.join()
    differing = [
        (number, place)
        for number, (was, now) in enumerate(zip(alone, found, strict=True))
        for place, (a, b) in enumerate(zip(was, now, strict=True))
        if a != b
    ]
    assert not differing, (len(differing), differing[:5])
    assert len(outcomes) >= 50
    assert outcomes.count("ran") >= len(outcomes) - 4, outcomes
