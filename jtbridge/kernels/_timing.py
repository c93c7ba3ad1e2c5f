"""The time that a launch takes, measured by Triton's own benchmark.

Triton launches a candidate on torch's tensors and torch's stream. On this stream ``triton.testing.do_bench`` records
its events and clears the second-level cache. A candidate is not timed as a jitted JAX call: XLA launches on its own
stream, so events on torch's stream would measure how long the host waited, not how long the kernel ran. The compiled
code is the same, because jax-triton also uses Triton's compiler, with the same options.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jtbridge.core.dtypes import torch_dtype
from jtbridge.triton import COMPILER_OPTIONS

_DEVICE = "cuda"


@functools.cache
def untimed_reason() -> str | None:
    """Return the reason that no kernel can be timed in this process; None if kernels can be timed."""
    import torch

    if not torch.cuda.is_available():
        return "this torch has no GPU, and Triton times kernels on torch's stream"
    return None


def milliseconds(
    kernel: Any,
    operands: Sequence[Any],
    *,
    out_types: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    constants: Mapping[str, Any],
    num_warps: int,
    num_stages: int,
) -> float | str:
    """Return the median time of a launch on made-up arrays, or its error, for example for too much shared memory."""
    import torch
    from triton.errors import TritonError

    options = {**constants, "num_warps": num_warps, "num_stages": num_stages, **COMPILER_OPTIONS}
    try:
        wait_for_device()
        return _median_time(kernel[grid], operands, out_types, options)
    except (TritonError, RuntimeError) as error:  # from Triton's compiler, the driver, or torch when out of memory
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    finally:
        torch.cuda.empty_cache()  # JAX shares the GPU and may need the memory


def wait_for_device() -> None:
    """Wait until the GPU is idle, so that a timed kernel does not share it with a program that JAX has started.

    JAX may not have submitted all programs to the GPU yet, so this first waits for the arrays that they compute. An
    error of such a program is ignored: whoever reads the array gets it. Then torch waits for all streams of the GPU.
    """
    import torch

    for array in jax.live_arrays():
        with contextlib.suppress(RuntimeError):
            array.block_until_ready()
    torch.cuda.synchronize()


def _median_time(
    launch: Any, operands: Sequence[Any], out_types: Sequence[jax.ShapeDtypeStruct], options: Mapping[str, Any]
) -> float:
    import torch
    from triton.testing import do_bench

    given = [_made_up(x) if hasattr(x, "shape") else x for x in operands]
    results = [_made_up(x) for x in out_types]
    with torch.no_grad():
        median: Any = do_bench(lambda: launch(*given, *results, **options), warmup=10, rep=50, return_mode="median")
    return float(median)


def _made_up(x: Any) -> Any:
    import torch

    dtype = torch_dtype(np.dtype(x.dtype), "an operand of a kernel")
    if dtype.is_floating_point:
        return torch.randn(x.shape, device=_DEVICE).to(dtype)
    make = torch.ones if dtype == torch.bool else torch.zeros  # a boolean mask of ones hides no key
    return make(x.shape, device=_DEVICE, dtype=dtype)
