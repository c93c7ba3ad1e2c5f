"""Matrix products where torch's semantics differ from JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

import jtbridge
from jtbridge.errors import TranslationError
from jtbridge.lowerings import find

from .harness import check

X, Y = torch.randn(2, 3), torch.randn(3, 4)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_addmm_with_beta_zero_ignores_a_bias_of_nan():
    check(
        lambda b, x, y: torch.addmm(b, x, y, beta=0), torch.full((2, 2), torch.nan), torch.ones(2, 3), torch.ones(3, 2)
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
def test_integers_wrap_around(dtype):
    x = torch.tensor([[100, 100, 3], [7, 90, 1]]).to(dtype)
    check(torch.mm, x, x.mT.contiguous())
    check(lambda b, x, y: torch.addmm(b, x, y, beta=2, alpha=3), x[:, :2], x, x.mT.contiguous())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accumulated_in_float32(dtype):
    ones = torch.ones(1, 4096, dtype=dtype)
    check(torch.mm, ones, ones.mT.contiguous())  # accumulated in bfloat16 it would stop at 256
    check(torch.dot, ones[0, :3000], ones[0, :3000])
    check(torch.addbmm, ones[:, :1], ones[None], ones.mT[None])


# XLA on a CPU takes twice as long for a product of bfloat16 whose second matrix is transposed before it.
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x @ y.t(),
        lambda x, y: x @ y.transpose(-2, -1),
        lambda x, y: torch.addmm(x[0, 0], x, y.permute(1, 0)),
        lambda x, y: torch.bmm(torch.stack([x, y]), torch.stack([y, x]).mT.clone()),
        functional.linear,
    ],
)
def test_a_product_of_bfloat16_contracts_the_last_axes(function):
    x, y = torch.randn(2, 3, 3).bfloat16()
    check(function, x, y)
    ones = jnp.ones((3, 3), "bfloat16")
    program = jax.jit(jtbridge.wrap(function, backend="xla")).lower(ones, ones).compile().as_text()
    assert "transpose(" not in program


# XLA on a CPU takes up to three times as long for a product whose first matrix has few rows.
FEW_ROWS = {
    "mm": lambda x, w: x @ w.t(),
    "addmm": functional.linear,
    "linear of a batch": lambda x, w: functional.linear(x.unflatten(0, (2, -1)), w).flatten(0, 1),
}


@pytest.mark.parametrize("name", FEW_ROWS)
@pytest.mark.parametrize("rows", [2, 64])
def test_product_of_few_rows_has_larger_matrix_as_left_operand(name, rows):
    x, weight = torch.randn(rows, 256, dtype=torch.float64), torch.randn(512, 256, dtype=torch.float64)
    check(FEW_ROWS[name], x, weight, grad=True, rtol=1e-12, atol=1e-12)
    function = jtbridge.wrap(FEW_ROWS[name], backend="xla")
    with jax.enable_x64(False):
        program = jax.jit(function).lower(jnp.ones((rows, 256)), jnp.ones((512, 256))).compile().as_text()
    assert f"f32[512,{rows}]" in program


@pytest.mark.parametrize("shape", [(1, 256), (65, 256)])
def test_one_or_many_rows_are_the_left_operand(shape):
    function = jtbridge.wrap(functional.linear, backend="xla")
    program = jax.jit(function).lower(jnp.ones(shape), jnp.ones((512, 256))).compile().as_text()
    assert f"f32[512,{shape[0]}]" not in program


def test_transforms_of_a_product_of_few_rows():
    x, weight = torch.randn(4, 256, dtype=torch.float64), torch.randn(512, 256, dtype=torch.float64)

    def loss(x, w):
        return functional.linear(x, w).pow(3).sum()

    ours = jtbridge.wrap(loss, backend="xla")
    with jax.enable_x64():
        a, b = jnp.asarray(x), jnp.asarray(weight)
        tangent = jax.jit(lambda a: jax.jvp(jax.grad(ours), (a, b), (jnp.cos(a), b))[1])(a)
        rows = jax.jit(jax.vmap(jax.grad(ours), (0, None)))(jnp.stack([a, -2 * a]), b)
        weights = jax.jit(jax.vmap(ours, (None, 0)))(a, jnp.stack([b, -b]))
        linear = jtbridge.wrap(functional.linear, backend="xla")
        transposed = jax.jit(lambda y: jax.linear_transpose(lambda a: linear(a, b), a)(y)[0])(linear(a, b))
    by_torch = torch.func.grad(loss)
    expected = torch.func.jvp(by_torch, (x, weight), (x.cos(), weight))[1]
    np.testing.assert_allclose(tangent, expected, rtol=1e-10)
    np.testing.assert_allclose(rows, torch.stack([by_torch(x, weight), by_torch(-2 * x, weight)]), rtol=1e-10)
    np.testing.assert_allclose(weights, [loss(x, weight), loss(x, -weight)], rtol=1e-10)
    np.testing.assert_allclose(transposed, functional.linear(x, weight) @ weight, rtol=1e-10)


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.vdot, (torch.randn(3, dtype=torch.complex64), torch.randn(3, dtype=torch.complex64))),
        (lambda b, x, y: torch.addr(b, x, y, beta=2, alpha=3), (X, X[:, 0], X[0])),
        (lambda b, x, y: torch.addr(b, x, y, beta=0), (torch.full((2, 3), torch.nan), X[:, 0], X[0])),
        (torch.addr, (X > 0, X[:, 0] > 0, X[0] > 0)),
        (lambda b, x, y: torch.addmv(b, x, y, beta=0.5, alpha=2), (torch.tensor(1.0), X, Y[:, 0])),
        (lambda b, x, y: torch.baddbmm(b, x, y, beta=3), (X[0, :1], X[None], Y[None])),
        (torch.mm, (torch.ones(2, 0), torch.ones(0, 3))),
        (torch.mv, (torch.ones(2, 0), torch.ones(0))),
        (torch._int_mm, (torch.full((32, 64), 127, dtype=torch.int8), torch.full((64, 16), 127, dtype=torch.int8))),
        (torch.chain_matmul, (X, Y, torch.randn(4, 2))),
    ],
)
def test_products(function, args):
    check(function, *args)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.bmm(x, w.expand(4, 3, 5)),
        lambda x, w: torch.bmm(w.mT.expand(4, 5, 3), x.mT),
        lambda x, w: torch.bmm(x[0].expand(4, 2, 3), w.expand(4, 3, 5)),
        lambda x, w: torch.nn.functional.linear(x.mT.contiguous().mT, w.mT),
        lambda x, w: torch.bmm(x[:0], w.expand(0, 3, 5)),
        lambda x, w: torch.bmm(x[:1], w.expand(1, 3, 5)),
    ],
)
def test_products_with_one_matrix_for_a_whole_batch(function):
    check(function, torch.randn(4, 2, 3), torch.randn(3, 5))


def test_linear_layer_does_not_copy_its_weight_per_batch_element():
    layer = torch.nn.functional.linear
    function = jax.jit(jtbridge.wrap(lambda x, w: layer(x.transpose(1, 2), w), backend="xla"))
    program = function.lower(jnp.ones((7, 64, 3)), jnp.ones((48, 64))).compile().as_text()
    assert "f32[7,3,48]" in program
    assert "f32[7,64,48]" not in program
    assert "f32[7,48,64]" not in program


def test_gradient_of_a_product():
    check(torch.matmul, torch.randn(2, 3, 4), torch.randn(4, 5), grad=True)


@pytest.mark.parametrize("sizes", [(3, 5), (1, 5), (3, 1)])
def test_a_bilinear_form_and_its_gradients(sizes):
    m, n = sizes
    args = torch.randn(4, m), torch.randn(4, n), torch.randn(2, m, n), torch.randn(2)
    check(torch.nn.functional.bilinear, *args, grad=True, rtol=1e-4, atol=1e-4)


def test_a_scaled_product_saturates_where_the_format_has_no_infinity():
    def product(x, y, by):
        a, b = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn)
        return torch._scaled_mm(a, b.t().contiguous().t(), by, by).to(torch.float32)

    check(product, torch.randn(16, 16), torch.randn(16, 16), torch.tensor(100.0))


def test_scales_of_blocks_are_refused():
    a, one = jnp.ones((16, 16), jnp.float8_e4m3fn), jnp.ones((16, 1))
    lowering = find(torch.ops.aten._scaled_mm_v2.default)
    assert lowering is not None
    with pytest.raises(TranslationError, match="blocks"):
        lowering.function(a, a, [one], [2], [0], [one], [2], [0], None, torch.float32, node=None)


def test_products_of_vectors_that_are_transposed():
    v, w = torch.randn(5), torch.randn(5)
    check(torch.inner, v, w)
    check(lambda v, w: torch.dot(v.t(), w.t()), v, w)
    check(lambda v, w: torch.dot(v, w.permute(0)), v, w)
