"""attention: its kernels compiled for GPUs, with the shared memory and the registers that they need."""

import jax
import jax.numpy as jnp
import pytest

from jtbridge.kernels import attention
from jtbridge.kernels._attention import configurations, differentiable
from jtbridge.kernels._chip import Chip

from .harness import (
    ARCHITECTURES,
    candidate_counts,
    compiled,
    kernels_in,
    launches,
    needs_compiler,
    needs_triton,
)

KERNELS = ["attention_forward", "attention_backward_key_value", "attention_backward_query"]


def of_size(d, dtype="bfloat16", length=1024):
    return [jnp.zeros((1, 4, length, d), dtype)] * 4


def gradients(**keywords):
    return lambda ct, query, key, value: jax.vjp(lambda *x: attention(*x, **keywords), query, key, value)[1](ct)


SHARED = {80: 163 * 1024, 90: 227 * 1024}
# Bytes that each thread spills if the blocks divide the lengths. For other lengths it spills more.
SPILLED = {
    (64, "bfloat16"): 128,
    (128, "bfloat16"): 192,
    (256, "bfloat16"): 192,
    (128, "float32"): 64,
    (256, "float32"): 320,
}


@needs_triton
@needs_compiler
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("d", sorted({d for d, _ in configurations.FORWARD}))
@candidate_counts
def test_configurations_compile(d, dtype, architecture, count, monkeypatch, tmp_path):
    entry = d, jnp.dtype(dtype).itemsize
    tables = [configurations.FORWARD, configurations.BACKWARD_KEY_VALUE, configurations.BACKWARD_QUERY]
    for i in range(count or max(len(table[entry]) for table in tables)):
        of_turn = {id(table): table[entry][min(i, len(table[entry]) - 1)] for table in tables}
        monkeypatch.setattr(configurations, "default", lambda table, *_, turn=of_turn: turn[id(table)])
        found = launches(gradients(is_causal=True), *of_size(d, dtype))
        assert [launch.kernel.__name__ for launch in found] == KERNELS
        for launch, table in zip(found, tables, strict=True):
            configuration = of_turn[id(table)]
            assert (launch.constants["block_q"], launch.num_warps) == (configuration.queries, configuration.warps)
            usage = compiled(launch, architecture, tmp_path)
            assert usage.shared <= SHARED[architecture]
            assert usage.spilled <= SPILLED.get((d, dtype), 0)


@needs_triton
@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("entry", configurations.FORWARD)
def test_default_fits_a_chip_with_little_shared_memory(entry, monkeypatch, tmp_path):
    small = Chip("NVIDIA L4", 89)
    monkeypatch.setattr(differentiable, "target", lambda: small)
    d, itemsize = entry
    for launch in launches(gradients(is_causal=True), *of_size(d, {2: "bfloat16", 4: "float32"}[itemsize])):
        assert compiled(launch, 89, tmp_path).shared <= small.shared == 99 * 1024


@needs_triton
@needs_compiler
@pytest.mark.parametrize(
    "chip",
    [
        Chip("NVIDIA L4", 89),
        pytest.param(Chip("NVIDIA A100", 80), marks=pytest.mark.exhaustive),
        pytest.param(Chip("NVIDIA H100", 90), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
@pytest.mark.parametrize("entry", configurations.FORWARD)
def test_default_with_an_additive_mask_fits_shared_memory(entry, chip, monkeypatch, tmp_path):
    monkeypatch.setattr(differentiable, "target", lambda: chip)
    d, itemsize = entry
    query, key, value, ct = of_size(d, {2: "bfloat16", 4: "float32"}[itemsize])
    mask = jax.ShapeDtypeStruct((query.shape[2], key.shape[2]), jnp.float32)

    def with_mask(query, key, value, ct, mask):
        return jax.vjp(lambda *x: attention(*x, mask=mask, implementation="triton"), query, key, value)[1](ct)

    for launch in launches(with_mask, query, key, value, ct, mask):
        assert compiled(launch, chip.capability, tmp_path).shared <= chip.shared


@needs_compiler
def test_default_depends_on_the_chip():
    ampere, hopper = Chip("NVIDIA A100", 80), Chip("NVIDIA H100", 90)
    entries = configurations.FORWARD[64, 2]
    assert configurations.default(configurations.FORWARD, (64, 2), ampere) == entries[1]
    assert configurations.default(configurations.FORWARD, (64, 2), hopper) == entries[0]


@needs_triton
@needs_compiler
@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")])
def test_one_program_has_the_kernels_for_a_gpu(platforms):
    args = of_size(64, length=100)
    mask = jnp.zeros((4, 100, 100))
    assert kernels_in(gradients(mask=mask), *args, platforms=platforms) == KERNELS
    assert kernels_in(gradients(mask=mask), *args, platforms=("cpu",)) == []
