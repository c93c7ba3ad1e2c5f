"""Memories that autotuned kernels write in place: the aliases that jaxlib's autotuner gets, and results.

The autotuner runs a kernel once for each configuration and then restores an input that the kernel wrote to, but only if
the input and the result have the same index.
"""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

import jtbridge
from tests.kernels.harness import needs_compiler, needs_triton, pretending

pytestmark = [needs_triton, needs_compiler]

X = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
Y, Z = X + 1, X * 2


def arguments(name: str) -> tuple[np.ndarray, ...]:
    return (X, Y) if name == "accumulated" else (X, Y, Z)


def kernel(name: str):
    from . import alias_kernels

    return jtbridge.wrap(getattr(alias_kernels, name))


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "written"), [("accumulated", 1), ("several", 2)])
def test_written_input_is_aliased_to_its_result(name, written, monkeypatch):
    from jax_triton import triton_lib

    library = triton_lib.triton_kernel_call_lib
    told: list[tuple[tuple[int, int, int], ...]] = []
    real = library.TritonAutotunedKernelCall

    def record(name, calls, aliases):
        told.append(tuple(aliases))
        return real(name, calls, aliases)

    monkeypatch.setattr(library, "TritonAutotunedKernelCall", record)
    with pretending(90):
        text = jax.jit(kernel(name)).trace(*arguments(name)).lower(lowering_platforms=("cuda",)).as_text()
    assert told == [tuple((i, i, X.nbytes) for i in range(written))]
    aliases = re.findall(r"output_tuple_indices = \[(\d*)\],\s*operand_index = (\d+)", text)
    assert len(aliases) == written
    assert all((result or "0") == operand for result, operand in aliases)


def test_aliased_results_match_torch():
    got = jax.jit(kernel("accumulated"))(X, Y)
    np.testing.assert_allclose(got, X + Y, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(kernel("accumulated"))(X, Y), X + Y, rtol=1e-6)
    for found, want in zip(jax.jit(kernel("several"))(X, Y, Z), (X * 100, Y + X, Z - X), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
