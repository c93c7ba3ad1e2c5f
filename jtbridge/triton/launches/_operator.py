"""The torch operator of a launch: it takes memories, and returns new values of the written memories."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence

import torch

from jtbridge.errors import LaunchError

from ._interpreter import interpret
from ._launch import Launch
from ._memory import refuse_hidden_views

# A graph refers to a launch by its number. The metadata of the graph's nodes keeps the launch alive.
_LAUNCHES: weakref.WeakValueDictionary[int, Launch] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register_launch(launch: Launch) -> int:
    """Return a number with which :func:`find_launch` finds the launch while it is alive."""
    number = next(_numbers)
    _LAUNCHES[number] = launch
    return number


def find_launch(number: int) -> Launch:
    """Return the launch with a number of :func:`register_launch`."""
    return _LAUNCHES[number]


class _Running(threading.local):
    """A flag of each thread: whether it runs a kernel with Triton, so that its launches are not intercepted."""

    kernel = False


RUNNING = _Running()


def run_on_gpu(launch: Launch, memories: Sequence[torch.Tensor]) -> None:
    """Launch a kernel with Triton on memories of a GPU, which the kernel modifies."""
    RUNNING.kernel = True
    try:
        launch.kernel.run(grid=launch.grid, warmup=False, **launch.evaluated_arguments(memories), **launch.options)
    finally:
        RUNNING.kernel = False


@torch.library.custom_op("jtbridge::launch", mutates_args=())
def launch_operator(memories: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Return the new values of the memories that a kernel writes. The given memories are not modified.

    Args:
        memories: the memories of the kernel's tensors, see :func:`memories_of`.
        number: the number of the launch, see :func:`register_launch`.
    """
    launch = find_launch(number)
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
    return [torch.empty_like(memories[i], memory_format=torch.contiguous_format) for i in find_launch(number).written]


@launch_operator.register_vmap
def _(info, in_dims, memories, number):
    """Launch once for each row, because the kernel's pointer arithmetic is not known."""
    launch, dims = find_launch(number), in_dims[0]
    refuse_hidden_views(memories, launch.written, launch.name)
    rows = [
        launch_operator([x if d is None else x.select(d, i) for x, d in zip(memories, dims, strict=True)], number)
        for i in range(info.batch_size)
    ]
    columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    return columns, [0] * len(columns)


def _no_gradient(context: object, *grads: object) -> None:
    raise LaunchError(
        f"Kernel `{context.kernel}` is launched where autograd records, and Triton kernels have no gradient. "  # type: ignore[attr-defined]
        "Launch it in the forward of a torch.autograd.Function that defines `backward`, or call `register_autograd` of "
        "the operator that launches it."
    )


def _setup_context(ctx: object, inputs: tuple, output: object) -> None:
    ctx.kernel = find_launch(inputs[1]).name  # type: ignore[attr-defined]


launch_operator.register_autograd(_no_gradient, setup_context=_setup_context)
