"""How often jax-triton compiles the user's kernels when programs are lowered for a GPU."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import jtbridge
from tests.kernels.harness import needs_compiler, needs_triton, pretending

pytestmark = [needs_triton, needs_compiler, pytest.mark.cpu]


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """Record the intermediate representation of each kernel that jax-triton compiles."""
    from jax_triton import triton_lib

    from jtbridge.triton.launches import _adapter

    _adapter._made.cache_clear()  # forget the kernels of other tests, which jax-triton has compiled
    texts: list[str] = []
    real = triton_lib.compile_ttir_inplace

    def record(ttir, *args):
        texts.append(str(ttir))
        return real(ttir, *args)

    monkeypatch.setattr(triton_lib, "compile_ttir_inplace", record)
    return texts


def lowered(fn: Callable, *shapes: tuple[int, ...]) -> None:
    """Trace a function again and lower its program."""
    with pretending(90):
        given = [jnp.ones(shape) for shape in shapes]
        jax.jit(lambda *xs: jtbridge.wrap(fn)(*xs)).trace(*given).lower(lowering_platforms=("cuda",))


def test_programs_with_the_same_launch_compile_once(compiled):
    from .kernels import add

    lowered(add, (8, 40), (8, 40))
    assert len(compiled) == 1
    lowered(add, (8, 40), (8, 40))
    lowered(lambda x, y: add(add(x, y), x), (8, 40), (8, 40))
    lowered(add, (320,), (320,))  # of as many elements
    assert len(compiled) == 1


def test_configurations_of_an_autotuned_kernel(compiled):
    from .alias_kernels import accumulated

    for _ in range(2):
        lowered(accumulated, (7, 9), (7, 9))
    assert len(compiled) == 2


def test_different_parameters_compile_separately(compiled):
    from .kernels import scaled
    from .memory_kernels import halves_scaled

    lowered(scaled, (6, 5))
    once = len(compiled)
    assert once > 0
    lowered(halves_scaled, (6, 4))
    assert len(compiled) > once


def test_a_number_of_64_bits_is_not_rounded_to_32(compiled):
    from .way_kernels import numbers

    lowered(lambda x: numbers(x, True), (64,))
    (text,) = compiled
    assert "1.000000000003" in text


@pytest.mark.parametrize("name", ["FACTOR", "SHIFT"])
def test_a_global_variable_with_another_value(compiled, monkeypatch, name):
    from . import global_kernels
    from .global_kernels import line, tl

    for value in (5, 7, 7):
        monkeypatch.setattr(global_kernels, name, tl.constexpr(value))
        lowered(line, (48,))
    assert len(compiled) == 2
    assert ["7." in text or "<7" in text for text in compiled] == [False, True]
