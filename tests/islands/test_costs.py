"""Operators that torch runs inside translated programs because it is measured to be faster."""

from __future__ import annotations

import json
from importlib import resources

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.nn import functional

import jtbridge
from jtbridge.translate import _costs
from tests.compare import assert_matches, assert_trees_close

_CALL = "@xla_buffer_python_cpu_callback"
torch.manual_seed(0)
IMAGE, KERNEL = torch.randn(2, 32, 56, 56), torch.randn(32, 4, 3, 3) / 6
X, W = jnp.asarray(IMAGE.numpy()), jnp.asarray(KERNEL.numpy())


def grouped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(x.sin(), w, padding=1, groups=len(w) // 4).tanh()


def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (grouped(x, w) * x).sum()


def calls_in(function, *args) -> int:
    return jax.jit(function).lower(*args).as_text().count(_CALL)


def test_only_large_convolutions_are_islands():
    f = jtbridge.wrap(grouped)
    assert calls_in(f, X, W) == 1
    assert calls_in(f, X[:1, :8, :8, :8], W[:8]) == 0
    assert_matches(jax.jit(f)(X, W), grouped(IMAGE, KERNEL))


def test_an_expanded_argument_is_left_to_xla():
    def of_forward(function, *args):
        return [island for island in jtbridge.explain(jtbridge.wrap(function), *args).islands if not island.gradient]

    x, weight = jnp.ones((100, 128, 64), "bfloat16"), jnp.ones((128, 256), "bfloat16")
    assert not of_forward(lambda x, w: torch.bmm(x.mT, w.expand(len(x), *w.shape)), x, weight)
    assert of_forward(lambda x, w: torch.bmm(x.mT, w), x, jnp.ones((100, 128, 256), "bfloat16"))


def test_max_pooling_is_an_island_only_if_indices_are_used():
    f = jtbridge.wrap(lambda x: functional.max_pool2d(x.sin(), 2).tanh())
    gradient = jax.grad(lambda x: f(x).sum())
    assert (calls_in(f, X), calls_in(gradient, X)) == (0, 1)
    image = IMAGE.clone().requires_grad_()
    expected = functional.max_pool2d(image.sin(), 2).tanh()
    assert_matches(jax.jit(f)(X), expected.detach())
    assert_matches(jax.jit(gradient)(X), torch.autograd.grad(expected.sum(), image)[0], 1e-5)


def test_gradient_of_an_island_is_an_island():
    gradient = jax.grad(jtbridge.wrap(loss), argnums=(0, 1))
    assert calls_in(gradient, X, W) == 2
    leaves = [IMAGE.clone().requires_grad_(), KERNEL.clone().requires_grad_()]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    assert_matches(jax.jit(gradient)(X, W), expected, 1e-4)


def test_bfloat16_product_with_transposed_first_matrix_is_an_island():
    x, y = jnp.ones((128, 512), "bfloat16"), jnp.ones((128, 512), "bfloat16")
    assert calls_in(jtbridge.wrap(lambda x, y: x.t() @ y), x, y) == 1
    assert calls_in(jtbridge.wrap(lambda x, y: x @ y.t()), x, y) == 0
    assert calls_in(jtbridge.wrap(lambda x, y: x @ y), x, y.T) == 0


@pytest.mark.parametrize("options", [{"islands": "needed"}, {"islands": "never"}, {"backend": "xla"}])
def test_options_that_disable_islands_for_speed(options):
    f = jtbridge.wrap(grouped, **options)
    assert calls_in(f, X, W) == 0
    assert_matches(jax.jit(f)(X, W), grouped(IMAGE, KERNEL), 1e-4)


def test_no_islands_in_exported_programs_or_for_other_platforms():
    f = jtbridge.wrap(grouped)
    assert _CALL not in jtbridge.export(f, X, W).mlir_module()
    assert _CALL not in jax.jit(f).trace(X, W).lower(lowering_platforms=("tpu",)).as_text()
    assert _CALL not in jax.jit(f).trace(X, W).lower(lowering_platforms=("cpu", "cuda")).as_text()


def test_no_islands_in_programs_sharded_over_devices():
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    if mesh.size < 2:
        pytest.fail("the tests run on several CPU devices")
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("batch")))
    w = jax.device_put(W, NamedSharding(mesh, PartitionSpec()))
    f = jtbridge.wrap(grouped)
    assert calls_in(f, x, w) == 0
    assert_matches(jax.jit(f)(x, w), grouped(IMAGE, KERNEL), 1e-4)


def test_inside_shard_map_each_device_runs_torch_on_its_shard():
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    f = jax.shard_map(
        jtbridge.wrap(grouped),
        mesh=mesh,
        in_specs=(PartitionSpec("batch"), PartitionSpec()),
        out_specs=PartitionSpec("batch"),
    )
    assert calls_in(f, X, W) == 1
    assert_matches(jax.jit(f)(X, W), grouped(IMAGE, KERNEL), 1e-4)


def test_the_rows_of_a_batch_count():
    rows, few = torch.randn(4096, 64), torch.randn(2, 64)
    f = jax.vmap(jtbridge.wrap(lambda x: torch.cumsum(x, -1)))
    assert calls_in(f, jnp.asarray(rows.numpy())) == 1
    assert calls_in(f, jnp.asarray(few.numpy())) == 0
    assert_matches(jax.jit(f)(jnp.asarray(rows.numpy())), rows.cumsum(-1), 1e-4)


def test_a_batch_of_images_and_of_kernels_is_one_call():
    f = jax.vmap(jtbridge.wrap(grouped), in_axes=(0, None))
    many = jax.vmap(jtbridge.wrap(grouped), in_axes=(None, 0))
    images, kernels = torch.stack([IMAGE, 2 * IMAGE]), torch.stack([KERNEL, -KERNEL])
    for function, x, w, expected in (
        (f, images, KERNEL, [grouped(x, KERNEL) for x in images]),
        (many, IMAGE, kernels, [grouped(IMAGE, w) for w in kernels]),
    ):
        arrays = jnp.asarray(x.numpy()), jnp.asarray(w.numpy())
        assert calls_in(function, *arrays) == 1
        assert_matches(jax.jit(function)(*arrays), torch.stack(expected), 1e-4)


def test_batch_without_a_torch_batching_rule_is_left_to_xla():
    def attention(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    t = torch.randn(2, 2, 12, 512, 64)
    x = jnp.asarray(t.numpy())
    gradient = jax.grad(lambda q: jax.vmap(jtbridge.wrap(attention))(q, x, x).sum())
    assert calls_in(jax.vmap(jtbridge.wrap(attention)), x, x, x) == 0
    assert calls_in(gradient, x) == 0
    assert calls_in(jax.grad(lambda q: jtbridge.wrap(attention)(q, x[0], x[0]).sum()), x[0]) > 0
    assert_matches(jax.jit(jax.vmap(jtbridge.wrap(attention)))(x, x, x), attention(t, t, t), 1e-4)


def test_second_derivatives_scan_and_checkpoint():
    f = jtbridge.wrap(lambda x, w: (functional.conv2d(x**2, w, padding=1, groups=8) ** 2).mean())

    def curvature(x):
        return jax.jvp(jax.grad(lambda x: f(x, W)), (x,), (X,))[1]

    t = IMAGE.double()

    def of_torch(x):
        return (functional.conv2d(x**2, KERNEL.double(), padding=1, groups=8) ** 2).mean()

    _, expected = torch.autograd.functional.hvp(of_torch, t, t)
    assert calls_in(curvature, X) > 0
    assert isinstance(expected, torch.Tensor)
    assert_matches(jax.jit(curvature)(X), expected.float(), 1e-3)

    def stepped(x):
        return jax.lax.scan(lambda carry, _: (jtbridge.wrap(grouped)(carry, W), None), x, None, length=3)[0]

    once = IMAGE
    for _ in range(3):
        once = grouped(once, KERNEL)
    assert calls_in(stepped, X) == 1
    assert_matches(jax.jit(stepped)(X), once, 1e-3)

    plain = jax.grad(jtbridge.wrap(loss))
    again = jax.grad(jax.checkpoint(jtbridge.wrap(loss)))
    assert_trees_close(jax.jit(again)(X, W), jax.jit(plain)(X, W), 1e-5)


@pytest.mark.parametrize(
    ("policy", "runs"),
    [
        (jax.checkpoint_policies.everything_saveable, 1),
        (jax.checkpoint_policies.nothing_saveable, 2),
    ],
)
def test_checkpoint_policies_save_or_recompute_the_island(policy, runs):
    f = jax.checkpoint(jtbridge.wrap(lambda x, w: grouped(x, w).sin()), policy=policy)
    text = jax.jit(jax.grad(lambda x: (f(x, W) ** 2).sum())).lower(X).as_text()
    assert text.count(_CALL) == runs + 1  # and the gradient's own


def test_random_functions_with_islands_redraw_the_same_numbers_in_derivatives():
    def noisy(x, w):
        return functional.dropout(grouped(x, w), 0.5).sum()

    f = jtbridge.wrap(noisy)
    key = jax.random.key(3)

    def with_key(x):
        return f(x, W, rng=key)

    assert calls_in(with_key, X) == 1
    h = 1e-2 * jnp.ones_like(X)
    by_jit, gradient = jax.jit(jax.value_and_grad(with_key))(X)
    np.testing.assert_allclose(by_jit, jax.jit(with_key)(X), rtol=1e-5)
    along = jax.jvp(jax.jit(with_key), (X,), (h,))[1]
    np.testing.assert_allclose((gradient * h).sum(), along, rtol=1e-3)
    np.testing.assert_allclose((jax.jit(with_key)(X + h) - jax.jit(with_key)(X - h)) / 2, along, rtol=2e-2)


def test_explain_gives_the_reason():
    report = jtbridge.explain(loss, X, W)
    operators = {island.operator: island for island in report.islands}
    assert set(operators) == {"aten.convolution.default", "aten.convolution_backward.default"}
    assert "times faster than XLA" in operators["aten.convolution.default"].reason
    assert "grouped 2d" in str(report)
    assert not jtbridge.explain(loss, X[:1, :8, :4, :4], W[:8]).islands


def test_size_threshold_is_above_the_last_measurement_xla_won():
    of_island = 200.0
    points = [
        (size, of_island * ratio, of_island) for size, ratio in ((1, 0.5), (10, 3), (100, 0.9), (1000, 1.2), (2000, 9))
    ]
    assert _costs._won(points) == ((1000, 1.2), (2000, 9.0))
    assert _costs._won(points[:1]) == ()


def test_small_gain_does_not_justify_a_call():
    assert _costs._won([(1, 30.0, 15.0), (10, 60.0, 30.0)]) == ((10, 2.0),)


def test_each_stored_measurement_names_an_operator_of_torch():
    rows = json.loads((resources.files("jtbridge.translate") / "measured" / "cpu.json").read_text())["rows"]
    for row in rows:
        _, name, overload = row["operator"].split(".")
        assert overload in getattr(torch.ops.aten, name).overloads()
        assert min(row["torch_us"], row["xla_us"], row["island_us"]) > 0
        assert row["size"] > 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.nn.functional.conv2d(x, x),
        lambda x: x[0, 0] @ x[0, 0],
        lambda x: torch.addmm(x[0, 0], x[0, 0], x[0, 0]),
        lambda x: functional.scaled_dot_product_attention(x, x, x),
        lambda x: torch.cumsum(x, dim=-1).cumsum(dim=0),
        lambda x: torch.sort(x, dim=-2, descending=True).values,
        lambda x: torch.topk(x, k=3, dim=1, largest=False).values,
        lambda x: torch.sum(torch.tensor(2.0).cumsum(0) * x),
    ],
    ids=range(8),
)
def test_one_tensor_for_several_arguments_and_arguments_by_name(function):
    t = torch.randn(4, 4, 256, 256)
    f = jtbridge.wrap(function)
    assert_matches(jax.jit(f)(jnp.asarray(t.numpy())), function(t), 1e-3)
