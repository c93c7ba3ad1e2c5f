"""A launch as an operator of torch: memories in, what the kernel makes of those that it writes out."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence

import torch

from jtbridge.errors import LaunchError

from ._interpreter import interpret
from ._launch import Launch
from ._memory import refuse_parts

# Graphs hold a launch by its number; what keeps it alive are the notes of their nodes.
_LAUNCHES: weakref.WeakValueDictionary[int, Launch] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def number_of(launch: Launch) -> int:
    """A number by which :func:`launch_of` finds it for as long as it lives."""
    number = next(_numbers)
    _LAUNCHES[number] = launch
    return number


def launch_of(number: int) -> Launch:
    """The launch that has this number."""
    return _LAUNCHES[number]


class _Running(threading.local):
    """Whether this thread has Triton itself run a kernel."""

    kernel = False


RUNNING = _Running()


def run_on_gpu(launch: Launch, memories: Sequence[torch.Tensor]) -> None:
    """Have Triton launch a kernel, which writes to memories of a GPU."""
    RUNNING.kernel = True
    try:
        launch.kernel.run(grid=launch.grid, warmup=False, **launch.arguments(memories), **launch.options)
    finally:
        RUNNING.kernel = False


@torch.library.custom_op("jtbridge::launch", mutates_args=())
def launch_operator(memories: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """What a kernel makes of the memories that it writes; those themselves stay as they are.

    Args:
        memories: what it is launched on, see :func:`memories_of`.
        number: of the launch, see :func:`number_of`.
    """
    launch = launch_of(number)
    given = [
        x.clone(memory_format=torch.contiguous_format) if i in launch.written else x.contiguous()
        for i, x in enumerate(memories)
    ]
    if given[0].is_cpu:
        interpret(launch, given)
    else:
        run_on_gpu(launch, given)
    return [given[i] for i in launch.written]


@launch_operator.register_fake
def _(memories: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    return [torch.empty_like(memories[i], memory_format=torch.contiguous_format) for i in launch_of(number).written]


@launch_operator.register_vmap
def _(info, in_dims, memories, number):
    """One launch for each row: what a kernel does with its pointers is not known."""
    launch, dims = launch_of(number), in_dims[0]
    refuse_parts(memories, launch.written, launch.name)
    rows = [
        launch_operator([x if d is None else x.select(d, i) for x, d in zip(memories, dims, strict=True)], number)
        for i in range(info.batch_size)
    ]
    columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    return columns, [0] * len(columns)


def _no_gradient(context: object, *grads: object) -> None:
    raise LaunchError(
        f"Kernel `{context.kernel}` is launched where gradients are recorded, and Triton kernels have none. "  # type: ignore[attr-defined]
        "Launch it in the forward of a torch.autograd.Function with a backward of its own, or give the operator that "
        "launches it `register_autograd`."
    )


def _note(ctx: object, inputs: tuple, output: object) -> None:
    ctx.kernel = launch_of(inputs[1]).name  # type: ignore[attr-defined]


launch_operator.register_autograd(_no_gradient, setup_context=_note)
