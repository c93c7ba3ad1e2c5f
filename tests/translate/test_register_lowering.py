"""Lowerings of users' operators."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import LoweringError, TranslationError
from jtbridge.lowerings import _registry


@torch.library.custom_op("jtbridge_lowering_tests::cube", mutates_args=())
def cube(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x**3 * scale


@cube.register_fake
def _(x, scale):
    return torch.empty_like(x)


@torch.library.custom_op("jtbridge_lowering_tests::cube_backward", mutates_args=())
def cube_backward(x: torch.Tensor, grad: torch.Tensor, scale: float) -> torch.Tensor:
    return 3 * x**2 * grad * scale


@cube_backward.register_fake
def _(x, grad, scale):
    return torch.empty_like(x)


def _backward(ctx, grad):
    return cube_backward(ctx.saved_tensors[0], grad, ctx.scale), None


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


cube.register_autograd(_backward, setup_context=_save)


@jtbridge.register_lowering(torch.ops.jtbridge_lowering_tests.cube.default)
def cube_in_jax(x, scale):
    return x**3 * scale


@jtbridge.register_lowering(cube_backward)
def cube_backward_in_jax(x, grad, scale):
    return 3 * x**2 * grad * scale


X = jnp.arange(6.0).reshape(2, 3)


def test_lowering_is_used_forward_backward_and_batched():
    f = jtbridge.wrap(lambda x: cube(x, 2.0), backend="xla")
    np.testing.assert_allclose(jax.jit(f)(X), 2 * X**3)
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(X), 6 * X**2)
    np.testing.assert_allclose(jax.vmap(jax.grad(lambda x: f(x).sum()))(X), 6 * X**2)
    assert "custom_call" not in jax.jit(jax.grad(lambda x: f(x).sum())).lower(X).as_text()


@pytest.mark.parametrize(
    "operator",
    [
        torch.ops.jtbridge_lowering_tests.cube,
        torch.ops.jtbridge_lowering_tests.cube.default,
        cube,
        "jtbridge_lowering_tests::cube",
    ],
    ids=["packet", "overload", "definition", "name"],
)
def test_a_second_lowering_is_refused(operator):
    with pytest.raises(LoweringError, match=r"`jtbridge_lowering_tests::cube` has a lowering already, `cube_in_jax`"):
        jtbridge.register_lowering(operator)(lambda x, scale: x)


def test_built_in_lowerings_are_not_replaced():
    with pytest.raises(LoweringError, match="`aten::sin` has a lowering already, jtbridge's own"):
        jtbridge.register_lowering(torch.ops.aten.sin.default)(jnp.sin)


@pytest.mark.parametrize("name", ["jtbridge_lowering_tests::nothing", "nowhere::nothing"])
def test_an_operator_that_does_not_exist_is_refused(name):
    with pytest.raises(LoweringError, match=f"There is no operator `{name}`"):
        jtbridge.register_lowering(name)


def test_no_operator_is_refused():
    with pytest.raises(LoweringError, match="takes the operators to lower"):
        jtbridge.register_lowering()(jnp.sin)


def test_one_overload_has_to_be_named():
    with pytest.raises(LoweringError, match=r"Name one of: .*aten::add\.Tensor"):
        jtbridge.register_lowering("aten::add")
    with pytest.raises(LoweringError, match="takes an operator such as"):
        jtbridge.register_lowering(torch.sin)


@torch.library.custom_op("jtbridge_lowering_tests::wrong", mutates_args=())
def wrong(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@wrong.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.mark.parametrize(
    ("result", "given"),
    [
        (lambda x: x.sum(), r"float32\[\]"),
        (lambda x: x.astype(int), r"int64\[2, 3\]"),
        (lambda x: None, "a NoneType"),
        (lambda x: 2.0, "a float"),
    ],
    ids=["shape", "dtype", "None", "number"],
)
def test_a_lowering_of_another_result_is_refused(result, given, monkeypatch):
    monkeypatch.setattr(_registry, "_LOWERINGS", dict(_registry._LOWERINGS))
    jtbridge.register_lowering(wrong)(result)
    for call in (jtbridge.wrap(wrong, backend="xla"), jax.jit(jtbridge.wrap(wrong))):
        with pytest.raises(LoweringError, match=rf"gave {given} where torch has float32\[2, 3\]"):
            call(X)
    report = jtbridge.check(jtbridge.wrap(wrong), X)
    assert not report.ok


@torch.library.custom_op("jtbridge_lowering_tests::choosy", mutates_args=())
def choosy(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@choosy.register_fake
def _(x):
    return torch.empty_like(x)


@jtbridge.register_lowering(choosy)
def choosy_in_jax(x):
    if x.ndim == 1:
        raise TranslationError("vectors are for torch")
    return x.twice


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
def test_refused_arguments_run_in_torch_and_exceptions_are_reported():
    f = jax.jit(jtbridge.wrap(choosy))
    np.testing.assert_array_equal(f(X[0]), 2 * X[0])
    with pytest.raises(LoweringError, match=r"the lowering of operator .*choosy.* failed: AttributeError"):
        f(X)


@torch.library.custom_op("jtbridge_lowering_tests::noise", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.shape, dtype=x.dtype)


@noise.register_fake
def _(x):
    return torch.empty_like(x)


@jtbridge.register_lowering(noise, node=True, key=True)
def noise_in_jax(x, *, node, key):
    shape = node.meta["val"].shape
    return jax.random.normal(key(), tuple(shape), x.dtype)


def test_a_lowering_gets_the_node_and_a_random_key():
    f = jtbridge.wrap(lambda x: (noise(x), noise(x)), backend="xla")
    first, second = f(X, rng=jax.random.key(1))
    assert first.shape == X.shape
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, f(X, rng=jax.random.key(1))[0])
    assert not np.array_equal(first, f(X, rng=jax.random.key(2))[0])


def test_a_key_for_an_operator_that_is_not_random_is_refused():
    with pytest.raises(LoweringError, match=r"is not tagged as random. Define it with `tags="):
        jtbridge.register_lowering(torch.ops.aten.tan.default, key=True)(lambda x, *, key: x)


@torch.library.custom_op("jtbridge_lowering_tests::shifted", mutates_args=())
def shifted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@shifted.register_fake
def _(x):
    return torch.empty_like(x)


def test_the_line_that_the_refusal_proposes_registers_a_lowering():
    f = jtbridge.wrap(shifted, backend="xla")
    with pytest.raises(TranslationError, match="has no lowering") as refused:
        f(X)
    (line,) = re.findall(r"`(jtbridge\.register_lowering\(.*?\))`", str(refused.value))
    exec(f"@{line}\ndef lowering(x):\n    return x + 1", {"torch": torch, "jtbridge": jtbridge})
    np.testing.assert_array_equal(jtbridge.wrap(shifted, backend="xla")(X), X + 1)


@torch.library.custom_op("jtbridge_lowering_tests::shift_", mutates_args=("x",))
def shift_(x: torch.Tensor) -> None:
    x.add_(1)


def test_operator_that_writes_to_its_arguments_gets_no_lowering_suggestion():
    def fn(x):
        shift_(x)
        return x

    text = r"operator `jtbridge_lowering_tests\.shift_\.default` .* writes to its arguments, which no lowering can"
    with pytest.raises(TranslationError, match=text):
        jtbridge.wrap(fn, backend="xla")(X)
    np.testing.assert_array_equal(jax.jit(jtbridge.wrap(fn, backend="dlpack"))(X), X + 1)
