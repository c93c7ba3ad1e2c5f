"""Zero-copy calls: torch reads XLA's own buffers, and its results are copied once, into XLA's output buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
import torch.utils.dlpack
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import mlir

from jtbridge._compat import buffer_call, is_divided, is_exported, is_for_one_device, run_outside_transforms
from jtbridge.capture import GraphFunction, forward_graph
from jtbridge.core.functions import TorchFunction, TracedFunction
from jtbridge.core.host_memory import placed, reader, writer
from jtbridge.core.nested_calls import as_xla_callback
from jtbridge.core.runner import as_call_error, runner
from jtbridge.errors import BackendError
from jtbridge.transforms import Vmap
from jtbridge.translate import choose_runner, island_of, torch_island_p

from ._base import Backend, has_assumed_empty_results
from ._dlpack_gpu import gpu_callback, gpu_unavailable_reason
from ._partitioned_calls import lower_divided

_LARGE_BYTES = 1 << 18  # the size in bytes from which the copy of a result takes a large part of a call
_SHORT = 32  # the most operators of a function that is traced to make its calls faster: tracing takes milliseconds


class DlpackBackend(Backend):
    """The backend that calls torch on XLA's buffers in the same process, on a CPU or a GPU."""

    name = "dlpack"
    kind = "call"
    preference = 30
    uses_kernels = False

    def unavailable_reason(self, platform: str) -> str | None:
        return None if platform == "cpu" else gpu_unavailable_reason(platform)

    def lower(self, ctx: mlir.LoweringRuleContext, fn: TorchFunction, operands: Sequence[Any]) -> Sequence[Any]:
        platforms = ctx.module_context.platforms if ctx.platforms is None else ctx.platforms
        gpu = platforms[0] != "cpu"
        divided = lower_divided(ctx, fn, operands, gpu_callback if gpu else uncaptured_callback, gpu=gpu)
        if divided is not None:
            return divided
        callback = gpu_callback(fn) if gpu else buffer_callback(fn)
        return buffer_call(ctx, callback, operands, gpu=gpu, always=has_assumed_empty_results(fn))

    @run_outside_transforms
    def call(self, fn: TorchFunction, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        # Each tensor is a view of JAX's memory. `fn` copies an argument that the user's function writes to.
        outs = runner(fn)(lambda: [torch.utils.dlpack.from_dlpack(x.block_until_ready().__dlpack__()) for x in arrays])
        return to_arrays(fn, outs, arrays)


def buffer_callback(fn: TorchFunction) -> Callable[..., tuple[()]]:
    """Return the function that XLA calls with an execution context, its input buffers and its output buffers."""
    return as_xla_callback(_callback(fn, *_form_to_run(fn)))


def uncaptured_callback(fn: TorchFunction) -> Callable[..., tuple[()]]:
    """Return the function of :func:`buffer_callback`, but without a captured graph.

    A thread of XLA may not capture a graph while another thread traces.
    """
    return as_xla_callback(_callback(fn, fn, ()))


def _callback(fn: TorchFunction, runs: TorchFunction, written: tuple[int, ...]) -> Callable[..., tuple[()]]:
    count = len(fn.in_types)
    run = runner(runs, len(written))
    readers = [reader(type_) for type_ in runs.in_types]
    places = [*range(count), *(count + position for position in written)]
    writers = [(i, count + i, writer(type_)) for i, type_ in enumerate(fn.out_types) if i not in written]

    def callback(_: Any, *buffers: Any) -> tuple[()]:
        try:
            results = run(lambda: [read(buffers[i].__array__()) for read, i in zip(readers, places, strict=True)])
            for i, place, write in writers:
                write(buffers[place].__array__(), results[i])
        except BaseException as error:  # noqa: BLE001  (whatever the user's function raises; XLA knows no types)
            raise as_call_error(fn, error) from None
        return ()

    is_plain = runs is fn and all(read is torch.from_numpy for read in readers)
    return _direct_callback(fn, callback) if isinstance(fn, TracedFunction) and fn.direct and is_plain else callback


def _form_to_run(fn: TorchFunction) -> tuple[TorchFunction, tuple[int, ...]]:
    """Return the form of `fn` to run, and which results it writes to XLA's output buffers itself, without a copy."""
    graph = fn if isinstance(fn, GraphFunction) else None
    if 0 < fn.base.traits.operators <= _SHORT and (_is_batching_costly(fn) or _is_copying_costly(fn)):
        graph = forward_graph(fn)
    if graph is None:
        return fn, ()
    writing, written = graph.writing()
    return (writing, written) if written else (graph, ())


def _is_batching_costly(fn: TorchFunction) -> bool:
    """Return whether torch.vmap, which takes about 15 us per operator, is a large part of a call."""
    if not isinstance(fn, Vmap) or not isinstance(fn.fn, TracedFunction):
        return False
    return fn.size > 0 and not fn.summed and fn not in fn.base.cache.sequential


def _is_copying_costly(fn: TorchFunction) -> bool:
    """Return whether copying a result is a large part of a call: the function is not derived, and a result is large."""
    size = max((int(np.prod(type_.shape)) * type_.dtype.itemsize for type_ in fn.out_types), default=0)
    return isinstance(fn, TracedFunction) and size >= _LARGE_BYTES


def _direct_callback(fn: TracedFunction, general: Callable[..., tuple[()]]) -> Callable[..., tuple[()]]:
    """Return `general` without the steps that a function of plain tensors to one plain tensor does not need.

    These steps cost as much as a small operator (measured: 4 us of 15 at 16 floats).
    """
    count = len(fn.in_types)
    is_active = fn.state.activity_check()
    call, is_expected, write = fn.call, fn.is_expected, writer(fn.out_types[0])
    from_numpy = torch.from_numpy

    def callback(context: Any, *buffers: Any) -> tuple[()]:
        if not is_active():
            return general(context, *buffers)
        try:
            out = call(*[from_numpy(buffer.__array__()) for buffer in buffers[:count]])
            if not is_expected(out):
                (out,) = fn.checked(out)
            write(buffers[count].__array__(), out)
        except BaseException as error:  # noqa: BLE001  (whatever the user's function raises; XLA knows no types)
            raise as_call_error(fn, error) from None
        return ()

    return callback


def to_arrays(fn: TorchFunction, outs: Sequence[torch.Tensor], like: Sequence[jax.Array]) -> list[jax.Array]:
    """Return results as JAX arrays, each in its own memory, on the device of the inputs."""
    results = []
    for type_, out in zip(fn.out_types, outs, strict=True):
        # Always a copy: a result may alias an argument, a weight or another result.
        memory = np.empty(type_.shape, type_.dtype)
        writer(type_)(memory, out)
        results.append(memory)
    return placed(results, like)


BACKENDS = (DlpackBackend(),)


def _lower_island(
    ctx: mlir.LoweringRuleContext, *operands: Any, fn: TorchFunction, lowered: ClosedJaxpr | None
) -> Sequence[Any]:
    """Emit the call of an operator that torch runs inside a translated program, or its lowering if that is faster."""
    (backend,) = BACKENDS
    platforms = ctx.module_context.platforms if ctx.platforms is None else ctx.platforms
    refused = [reason for reason in map(backend.unavailable_reason, platforms) if reason is not None]
    if len(platforms) > 1:
        refused.append(f"the program is for several platforms ({', '.join(platforms)})")
    if is_exported(ctx):
        refused.append("the program is exported")
    if lowered is not None and (
        refused
        or is_divided(ctx)
        or not choose_runner(fn, lowered, platforms[0], measures=True, one_device=is_for_one_device(ctx)).in_torch
    ):
        return mlir.lower_fun(jaxpr_as_fun(lowered), multiple_results=True)(ctx, *operands)
    if refused:
        reason = refused[0]
        raise BackendError(f"{island_of(fn).reason}. Torch cannot run it inside the program, because {reason}.")
    return backend.lower(ctx, fn, operands)


mlir.register_lowering(torch_island_p, _lower_island)
