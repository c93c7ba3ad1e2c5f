"""Zero-copy calls on a GPU: torch runs on XLA's stream and XLA's buffers, and the host does not wait for the GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import torch
import torch.utils.dlpack

from jtbridge.core.functions import TorchFunction
from jtbridge.core.gpu_errors import add_device_note
from jtbridge.core.nested_calls import as_xla_callback
from jtbridge.core.runner import as_call_error
from jtbridge.errors import DeviceError

_THREAD = threading.local()


def gpu_unavailable_reason(platform: str) -> str | None:
    """Return why torch cannot be called on a platform's buffers; None if it can."""
    if platform not in ("cuda", "rocm"):
        return f'torch has no tensors over the buffers of platform "{platform}"'
    built_for = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    if built_for != platform:
        return f"this build of torch is for {built_for}"
    return None if torch.cuda.is_available() else "torch finds no GPU"


def gpu_callback(fn: TorchFunction) -> Callable[..., tuple[()]]:
    """Return the function that XLA calls with an execution context, its input buffers and its output buffers.

    The function only enqueues work. Torch's allocator keeps memory that the function frees for the same stream, so this
    memory is not reused too early. XLA keeps the inputs and outputs until its stream has passed the call.
    """
    count = len(fn.in_types)

    def callback(context: Any, *buffers: Any) -> tuple[()]:
        inputs: list[torch.Tensor] = []
        try:
            device = _gpu_of(buffers)
            with _on_stream(context.stream, device), fn.state.applied(), _by_default_on(device, fn):
                inputs = [_view_of_buffer(buffer) for buffer in buffers[:count]]
                results = fn(*inputs)
                with torch.no_grad():
                    for buffer, result in zip(buffers[count:], results, strict=True):
                        _view_of_buffer(buffer).copy_(result)
        except torch.OutOfMemoryError as error:
            raise as_call_error(fn, _explained(error)) from None
        except BaseException as error:  # noqa: BLE001  (whatever the user's function raises; XLA knows no types)
            if isinstance(error, RuntimeError):
                add_device_note(error, inputs)
            raise as_call_error(fn, error) from None
        return ()

    return as_xla_callback(callback)


def _view_of_buffer(buffer: Any) -> torch.Tensor:
    # The tensor is a view of XLA's memory. `fn` copies an argument that the user's function writes to.
    return torch.utils.dlpack.from_dlpack(buffer.__dlpack__())


def _make_context_current(device: torch.device) -> None:
    """Make a GPU's context current on this XLA thread. Otherwise torch warns before its first matrix product."""
    known = vars(_THREAD).setdefault("devices", set())
    if device not in known:
        torch.cuda.mem_get_info(device)  # a cheap call that needs the context
        known.add(device)


def _gpu_of(buffers: Sequence[Any]) -> torch.device:
    """Return the GPU of the buffers. XLA calls from several threads, on none of which torch's current GPU is set."""
    index = buffers[0].__dlpack_device__()[1] if buffers else torch.cuda.current_device()
    return torch.device("cuda", index)


@contextlib.contextmanager
def _on_stream(stream: int, device: torch.device) -> Iterator[None]:
    """Make torch use XLA's stream inside the block.

    XLA's stream first waits for pending work on torch's own stream, for example on weights. Afterwards torch's own
    stream waits for XLA's. On a thread of XLA, torch's own stream is its default stream.
    """
    own = torch.cuda.current_stream(device.index)
    xlas = torch.cuda.ExternalStream(stream, device=device.index)
    _make_context_current(device)
    xlas.wait_stream(own)
    try:
        with torch.cuda.stream(xlas):  # makes its GPU the current one, too
            yield
    finally:
        own.wait_stream(xlas)


def order_after_current_streams(devices: Iterable[jax.Device]) -> None:  # type: ignore[valid-type]
    """Make calls that this thread starts later wait for the work of torch's current streams on some devices.

    A call runs on a thread of XLA and waits for torch's default stream, which is current there. A user may have another
    current stream and may have written weights there.
    """
    if not torch.cuda.is_initialized():
        return
    for index in (device.local_hardware_id for device in devices if device.platform != "cpu"):
        current, default = torch.cuda.current_stream(index), torch.cuda.default_stream(index)
        if current != default:
            default.wait_stream(current)


def _by_default_on(device: torch.device, fn: TorchFunction) -> contextlib.AbstractContextManager:
    """Return a context that puts new tensors on the arguments' device, unless tracing had another default device.

    The context is a torch mode, which slows down every torch call, so it is not used if all code names its devices.
    """
    return contextlib.nullcontext() if fn.names_devices or fn.state.device is not None else torch.device(device)


def _explained(error: torch.OutOfMemoryError) -> DeviceError:
    return DeviceError(
        f"{error}\nJAX takes three quarters of a GPU's memory when it starts, and torch has what is left. Set "
        "XLA_PYTHON_CLIENT_MEM_FRACTION=.5 (or XLA_PYTHON_CLIENT_PREALLOCATE=false) before JAX starts."
    )
