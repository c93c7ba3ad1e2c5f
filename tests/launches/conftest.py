"""The backends that launch kernels here, and the allocator that Triton needs in a process with a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.harness import ON_GPU


@pytest.fixture(params=["xla", "dlpack", "callback"])
def backend(request):
    if ON_GPU and request.param == "callback":
        pytest.skip("Triton launches no kernels on tensors of the CPU in a process that has a GPU")
    return request.param


@pytest.fixture(autouse=True)
def scratch_memory() -> Iterator[None]:
    """Give Triton the memory for tensor descriptors, as a user of descriptors on a GPU has to."""
    if not ON_GPU:
        yield
        return
    import triton

    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    yield
