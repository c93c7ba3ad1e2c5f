"""Products of groups of rows with one matrix for each group; the sizes of the groups are data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import jtbridge
from jtbridge.lowerings.linalg import grouped_matmul

from .harness import check

ENDS = [[3, 7, 7, 20], [0, 0, 20, 20], [20, 20, 20, 20], [1, 2, 3, 20]]
dtypes = pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 2e-2, 2e-2)])


def grouped(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(a, b, offs=ends)


def operands(dtype: torch.dtype = torch.float32, rows: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 16).to(dtype), torch.randn(4, 16, 24).to(dtype)


@dtypes
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_groups_of_rows(ends, dtype, rtol, atol):
    a, b = operands(dtype)
    check(grouped, a, b, torch.tensor(ends, dtype=torch.int32), rtol=rtol, atol=atol, grad=True)


@dtypes
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_transposed_matrices_are_read_in_place(ends, dtype, rtol, atol):
    a, b = operands(dtype)
    stored = b.transpose(1, 2).contiguous()
    by_transposed = lambda a, b, ends: grouped(a, b.transpose(1, 2), ends)  # noqa: E731
    check(by_transposed, a, stored, torch.tensor(ends, dtype=torch.int32), rtol=rtol, atol=atol, grad=True)
    arrays = [jtbridge.to_jax(x) for x in (a, stored, torch.tensor(ends, dtype=torch.int32))]
    program = jax.jit(jtbridge.wrap(by_transposed, backend="xla")).lower(*arrays).compile().as_text()
    assert "transpose(" not in program
    columns = jax.vmap(jtbridge.wrap(by_transposed, backend="xla"), (0, None, None))
    np.testing.assert_allclose(
        np.asarray(columns(arrays[0][None], *arrays[1:])[0], np.float32),
        np.asarray(grouped(a, b, torch.tensor(ends, dtype=torch.int32)).float()),
        rtol=rtol,
        atol=atol,
    )


def test_groups_of_columns_and_of_the_contraction():
    a, b = operands()
    ends = torch.tensor(ENDS[0], dtype=torch.int32)
    check(grouped, b.transpose(1, 2).contiguous(), a.T, ends, grad=True)
    check(grouped, a.T, torch.randn(20, 8), ends)
    check(lambda a, b: F.grouped_mm(a, b), b.transpose(1, 2).contiguous(), b, grad=True)


@pytest.mark.parametrize("rows", [8, 500])
def test_groups_longer_and_shorter_than_a_block(rows):
    a, b = operands(rows=rows)
    ends = torch.tensor([0, rows // 4, rows // 4 + 1, rows], dtype=torch.int32)
    check(grouped, a, b, ends, rtol=1e-5, atol=1e-4, grad=True)


def test_rows_after_the_last_group_are_zeros_and_have_no_gradient():
    a, b = operands()
    ends = jnp.array([3, 7, 7, 12], jnp.int32)
    a, b = jtbridge.to_jax((a, b))
    product = jtbridge.wrap(grouped, backend="xla")
    expected = jnp.einsum("sk,skn->sn", a[:12], b[jnp.array([0] * 3 + [1] * 4 + [3] * 5)])
    np.testing.assert_allclose(product(a, b, ends)[:12], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(product(a, b, ends)[12:], 0)
    groups = np.repeat([0, 1, 3], [3, 4, 5])
    both = (lambda a, b: product(a, b, ends)[:12]), (lambda a, b: jnp.einsum("sk,skn->sn", a[:12], b[groups]))
    ours, theirs = (jax.grad(lambda a, b, f=f: (f(a, b) ** 2).sum(), (0, 1))(a, b) for f in both)
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_loop_on_cpu_matches_ragged_dot():
    a, b = jtbridge.to_jax(operands())
    sizes, y = jnp.array([3, 4, 0, 13], jnp.int32), jnp.cos(jnp.arange(160.0)).reshape(20, 8)
    ours, theirs = (f(a, b, sizes) for f in (grouped_matmul.rows_by_blocks, grouped_matmul.rows_by_ragged_dot))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    both = grouped_matmul.contraction_by_blocks, grouped_matmul.contraction_by_ragged_dot
    ours, theirs = (f(a, y, sizes) for f in both)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_platforms_use_ragged_dot(platform):
    a, b = jtbridge.to_jax(operands())
    ends = jnp.array(ENDS[0], jnp.int32)
    loss = lambda a, b: jtbridge.wrap(grouped, backend="xla")(a, b, ends).sum()  # noqa: E731
    text = jax.export.export(jax.jit(jax.grad(loss, (0, 1))), platforms=[platform])(a, b).mlir_module()
    assert "ragged_dot" in text
    assert "stablehlo.while" not in text


@pytest.mark.parametrize("batched", [(0, None, None), (None, 0, None), (0, 0, 0)], ids=str)
def test_batches_of_products(batched):
    torch.manual_seed(1)
    shapes, ends = ((20, 16), (4, 16, 24)), torch.tensor(ENDS[:2], dtype=torch.int32)
    args = [torch.randn(*((2,) if axis == 0 else ()), *shape) for shape, axis in zip(shapes, batched, strict=False)]
    args.append(ends if batched[2] == 0 else ends[0])
    got = jax.jit(jax.vmap(jtbridge.wrap(grouped, backend="xla"), batched))(*jtbridge.to_jax(args))
    for row in range(2):
        one = [x[row] if axis == 0 else x for x, axis in zip(args, batched, strict=True)]
        torch.testing.assert_close(jtbridge.to_torch(got[row]), grouped(*one), rtol=1e-5, atol=1e-5)


def test_forward_mode_and_second_derivatives():
    a, b = jtbridge.to_jax(operands())
    ends = jnp.array(ENDS[0], jnp.int32)
    product = jtbridge.wrap(grouped, backend="xla")

    def in_jax(a, b):
        groups = jnp.searchsorted(ends, jnp.arange(20), side="right")
        return jnp.einsum("sk,skn->sn", a, b[groups])

    def loss(function):
        return lambda a: (function(a, b) ** 3).sum()

    tangents = jnp.cos(a), jnp.sin(b)
    both = (lambda a, b: product(a, b, ends)), in_jax
    ours, theirs = (jax.jvp(f, (a, b), tangents) for f in both)
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    second = [jax.jvp(jax.grad(loss(f)), (a,), (a + 1,))[1] for f in both]
    np.testing.assert_allclose(*second, rtol=1e-4, atol=1e-2)
