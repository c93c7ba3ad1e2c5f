"""Other threads, and torch afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ._case import V, case


def _beside(run: Any, other: Callable[[], Any]) -> Any:
    def main() -> None:
        net = nn.Sequential(_fresh(), nn.Tanh(), nn.LayerNorm(4))
        f = run.wrap(lambda v: net(v) * 2)
        run(f, V)
        run.grad(f, V)

    return run.beside(other, main)


def _fresh() -> nn.Linear:
    layer = nn.utils.skip_init(nn.Linear, 4, 4)  # which draws nothing
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4))
        layer.bias.zero_()
    return layer


@case("threads")
def another_thread_draws(run):
    def other():
        torch.manual_seed(3)
        return torch.stack([torch.rand(()) for _ in range(3000)])

    yield _beside(run, other)


@case("threads")
def another_thread_makes_tensors(run):
    yield _beside(run, lambda: torch.tensor(sum(torch.empty(1).element_size() for _ in range(3000))))


@case("threads")
def another_thread_records(run):
    def other():
        x = torch.ones(2, requires_grad=True)
        return torch.tensor(sum((x * 2).requires_grad for _ in range(3000)))

    yield _beside(run, other)


@case("threads")
def another_thread_calls_a_module(run):
    def other():
        net, calls = _fresh(), []
        net.register_forward_hook(lambda m, a, y: calls.append(type(y)) or None)
        total = sum(net(V).sum() for _ in range(1000)).detach()
        return total, torch.tensor(len(calls)), torch.tensor(all(t is torch.Tensor for t in calls))

    yield _beside(run, other)


@case("threads")
def another_thread_has_its_flags(run):
    def flags():
        return (torch.backends.mkldnn.enabled, torch.backends.mha.get_fastpath_enabled(), torch.compiler.is_exporting())

    def other():
        first = flags()
        return torch.tensor(all(flags() == first for _ in range(5000)))

    yield _beside(run, other)


@case("threads")
def torch_s_stream_is_untouched(run):
    torch.manual_seed(5)
    f = run.wrap(lambda v: v.sin() @ v.cos())
    run(f, V)
    run.grad(f, V)
    yield torch.rand(4)


@case("threads")
def default_dtype_of_the_trace_alone(run):
    f = run.wrap(lambda v: v * torch.ones(1).element_size())
    torch.set_default_dtype(torch.float64)
    first = run(f, V)
    torch.set_default_dtype(torch.float32)
    yield first
    yield torch.tensor(torch.empty(1).element_size())
    yield run(f, V)


@case("threads")
def two_threads_call_one_function(run):
    f = run.wrap(lambda v: v.cumsum(0) * 2)
    results = []

    def work():
        results.append(run(f, V))

    import threading

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    yield torch.tensor(len(results))
    yield results
