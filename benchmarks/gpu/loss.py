"""The loss of a language model's head and its gradients, with and without the logits in memory."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch

from benchmarks._results import Cell, Failed
from jtbridge.kernels import linear_cross_entropy

from ._arrays import normal, tensors
from ._rows import Goal, Options, Row
from ._turns import Contestant, attempt, milliseconds

OURS, PLAIN, LIGER = "jtbridge.kernels", "plain JAX", "Liger-Kernel"


def _plain(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    logits = (hidden @ weight.T).astype("float32")
    of_label = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - of_label).mean()


def _arrays(options: Options) -> list[jax.Array]:
    tokens, width, classes = (16, 8, 32) if options.dry else (8192, 4096, 131_072)
    labels = jax.random.randint(jax.random.key(2), (tokens,), 0, classes)
    return [normal(tokens, width, seed=0), normal(classes, width, seed=1, scale=0.02), labels]


def _gradient(f: Any) -> Any:
    return jax.jit(jax.value_and_grad(lambda *xs: f(*xs).astype("float32"), (0, 1)))


def _ligers(arrays: list[jax.Array]) -> Contestant:
    from liger_kernel.transformers import functional

    hidden, weight, labels = tensors(arrays)
    leaves, labels = [hidden.requires_grad_(), weight.requires_grad_()], labels.long()

    def call() -> Any:
        loss = functional.liger_fused_linear_cross_entropy(*leaves, labels)
        return loss.float(), torch.autograd.grad(loss, leaves)

    return Contestant(call)


def time_row(options: Options) -> Row:
    """Time the loss with its gradients by the hidden states and by the weight."""
    arrays = _arrays(options)
    contestants = {
        name: attempt(lambda f=f: Contestant(functools.partial(_gradient(f), *arrays)))
        for name, f in {OURS: linear_cross_entropy, PLAIN: _plain}.items()
    }
    contestants[LIGER] = attempt(lambda: _ligers(arrays))
    cells = milliseconds(contestants, options, judge=PLAIN)
    return Row("loss-time", _title("time"), "ms", cells, (Goal(OURS, 1.1, (PLAIN,), at_most=True),))


def memory_row(options: Options) -> Row:
    """Measure the memory in addition to arguments and results: XLA's plan, and the peak of torch's allocator."""
    arrays = _arrays(options)
    cells: dict[str, Cell] = {
        name: _planned(f, arrays) for name, f in {OURS: linear_cross_entropy, PLAIN: _plain}.items()
    }
    cells[LIGER] = _allocated(arrays)
    return Row("loss-memory", _title("peak memory"), "MB", cells, (Goal(OURS, 0.25, (PLAIN,), at_most=True),))


def _title(what: str) -> str:
    return f"linear cross-entropy with gradients, 8k tokens, 4k wide, 128k classes: {what}"


def _planned(f: Any, arrays: list[jax.Array]) -> Cell:
    try:
        analysis = _gradient(f).lower(*arrays).compile().memory_analysis()
        return analysis.temp_size_in_bytes / 2**20
    except Exception as error:  # noqa: BLE001 - that a contestant fails is a result
        return Failed.from_error(error)


def _allocated(arrays: list[jax.Array]) -> Cell:
    if not torch.cuda.is_available():
        return Failed("torch tells the memory of a GPU alone")
    try:
        call = _ligers(arrays).call
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        kept = sum(x.numel() * x.element_size() for x in jax.tree.leaves(result))
        return (torch.cuda.max_memory_allocated() - before - kept) / 2**20
    except Exception as error:  # noqa: BLE001 - that a contestant fails is a result
        return Failed.from_error(error)


ROWS = {"loss-time": time_row, "loss-memory": memory_row}
