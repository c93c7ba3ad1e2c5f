"""`torch.cond` and `while_loop` in a trace: as `if` and `while`. Other operators with functions are refused."""

from __future__ import annotations

import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._higher_order_ops import scan, utils, while_loop
from torch.nn.attention.flex_attention import flex_attention

import jtbridge
from jtbridge import errors
from tests.compare import assert_matches

in_operators = pytest.mark.skipif(
    not hasattr(utils, "_hop_compile_and_call"), reason="torch 2.11 compiles control flow by other functions"
)
X = jnp.array([0.5, 1.5, 2.5])
WEIGHT = torch.nn.Parameter(torch.eye(3) * 2)


def cond(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() * x, lambda x: (x @ WEIGHT).exp(), (x,))


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x if x.sum() > 0 else (x @ WEIGHT).exp()


def nested(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x[0] > 0, cond, lambda x: x * x, (x,))


def plain_nested(x: torch.Tensor) -> torch.Tensor:
    return plain(x) if x[0] > 0 else x * x


def counted(x: torch.Tensor) -> torch.Tensor:
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 1.5), (torch.tensor(0), x))[1]


def until_large(x: torch.Tensor) -> torch.Tensor:
    return while_loop(lambda x: x.sum() < 100, lambda x: (x * 2,), (x,))[0]


def running_sum(x: torch.Tensor) -> torch.Tensor:
    return scan(lambda total, y: (total + y, total * y), torch.zeros(x.shape[1:]), x)[1]


ways = pytest.mark.parametrize("x", [X, -X, X * jnp.array([1.0, -9.0, 1.0])], ids=["first", "second", "mixed"])
functions = pytest.mark.parametrize(("fn", "same"), [(cond, plain), (nested, plain_nested)], ids=["cond", "nested"])


@in_operators
@ways
@functions
@pytest.mark.parametrize("backend", ["auto", "xla"])
def test_cond_is_translated(fn, same, x: jax.Array, backend: str):
    f, tensor = jtbridge.wrap(fn, backend=backend), torch.tensor(np.array(x), requires_grad=True)
    want = same(tensor)
    (gradient,) = torch.autograd.grad(want.sum(), tensor)
    assert "custom_call" not in jax.jit(f).lower(x).as_text()
    assert_matches(jax.jit(f)(x), want)
    assert_matches(jax.jit(jax.grad(lambda x: f(x).sum()))(x), gradient)
    assert_matches(jax.jit(lambda x: jax.jvp(f, (x,), (x,))[1].sum())(x), (gradient * tensor).sum())
    assert_matches(jax.jit(jax.vmap(f))(jnp.stack([x, -x])), torch.stack([want, same(-tensor)]))
    assert_matches(jtbridge.wrap(fn)(x), want)


@in_operators
def test_a_loop_of_a_known_length_is_translated():
    f = jtbridge.wrap(counted)
    assert "custom_call" not in jax.jit(f).lower(X).as_text()
    assert_matches(jax.jit(f)(X), counted(torch.tensor(np.array(X))))
    assert_matches(jax.jit(jax.grad(lambda x: f(x).sum()))(X), torch.full((3,), 1.5**3))


@in_operators
def test_a_loop_whose_length_depends_on_values_is_called():
    f = jtbridge.wrap(until_large)
    with pytest.warns(errors.CalledWarning, match="needs the values of tensors"):
        got = jax.jit(f)(X)
    assert_matches(got, until_large(torch.tensor(np.array(X))))
    with pytest.raises(errors.TranslationError, match="needs the values of tensors"):
        jax.jit(jtbridge.wrap(until_large, backend="xla"))(X)


@in_operators
def test_branches_with_other_shapes_are_refused():
    f = jtbridge.wrap(lambda x: torch.cond(x.sum() > 0, lambda x: x[:2] * 2, lambda x: x * 2, (x,)))
    with pytest.raises(errors.DataDependentShapeError, match="2 or 3 for different values"):
        jax.jit(f)(X)


@in_operators
def test_condition_on_a_shape_compiles_one_branch():
    f = jtbridge.wrap(lambda x: torch.cond(x.shape[0] > 2, lambda x: x * 2, lambda x: x.sin(), (x,)))
    assert "sine" not in jax.jit(f).lower(X).as_text()
    assert_matches(jax.jit(f)(X), torch.tensor(np.array(X)) * 2)


@in_operators
def test_reports_follow_the_branches():
    assert "every branch" in str(jtbridge.explain(cond, X))
    assert jtbridge.purity(cond, X).is_pure


def test_torch_cond_compiles_after_a_trace_and_on_other_threads():
    want, compiled, inside, end = cond(torch.tensor(np.array(X))), [], threading.Event(), threading.Event()

    def waits(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert end.wait(60)
        return x.sin()

    tracing = threading.Thread(target=lambda: jax.jit(jtbridge.wrap(waits))(X))
    tracing.start()
    assert inside.wait(60)

    def noting(fn, *args, **kwargs):
        compiled.append(fn)
        return fn

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(torch, "compile", noting)
        got = cond(torch.tensor(np.array(X)))
    end.set()
    tracing.join()
    assert len(compiled) == 1
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(cond(torch.tensor(np.array(X))), want)


def test_another_operator_with_functions_is_refused_under_jit():
    want = running_sum(torch.tensor(np.array(X)))
    assert_matches(jtbridge.wrap(running_sum)(X), want)
    for traced in (jax.jit(jtbridge.wrap(running_sum)), lambda x: jtbridge.explain(running_sum, x)):
        with pytest.raises(errors.TranslationError, match="`scan` is an operator that takes functions, and is not"):
            traced(X)
    with pytest.raises(errors.TranslationError, match="is an operator that takes functions"):
        jtbridge.purity(running_sum, X)
    torch.testing.assert_close(running_sum(torch.tensor(np.array(X))), want)
    ordered = jtbridge.wrap(running_sum, effects="ordered", output_shapes=jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert_matches(jax.jit(ordered)(X), want)


@in_operators
def test_torch_loop_runs_after_every_derivative():
    tensor = torch.tensor(np.array(X))
    want = counted(tensor)
    for backend in ("auto", "dlpack"):
        f = jtbridge.wrap(counted, backend=backend)
        assert_matches(jax.jit(lambda x, f=f: jax.jvp(f, (x,), (x,))[1])(X), want)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", errors.SequentialVmapWarning)
            assert_matches(jax.jit(jax.vmap(f))(X[None]), want[None])
        torch.testing.assert_close(counted(tensor), want)


def branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def scaled(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2.0)
    return branches(x)


def kept_and_written(x: torch.Tensor) -> torch.Tensor:
    y = branches(x)
    x.zero_()
    return y


def attention(x: torch.Tensor) -> torch.Tensor:
    return flex_attention(x, x, x, score_mod=lambda score, b, h, i, j: score - (i - j).abs())


def running_sums(x: torch.Tensor) -> torch.Tensor:
    return running_sum(x.view(4, -1))


sizes = pytest.mark.parametrize("size", [12, 2**16 + 4], ids=["copied", "shared"])


@in_operators
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:`torch.jit.script")  # as torch compiles
@sizes
@pytest.mark.parametrize("fn", [branches, counted, running_sums, kept_and_written], ids=lambda fn: fn.__name__)
def test_eager_calls_with_arguments_of_any_size(fn, size: int):
    x = jnp.linspace(-1.0, 2.0, size)
    before = np.array(x)
    f = jtbridge.wrap(fn)
    want = fn(torch.tensor(before))
    assert_matches(f(x), want)
    with pytest.warns(errors.SequentialVmapWarning, match="operators that take functions"):
        assert_matches(jax.vmap(f)(x[None])[0], want)
    if fn is not kept_and_written:
        leaf = torch.tensor(before, requires_grad=True)
        (gradient,) = torch.autograd.grad(fn(leaf).sum(), leaf)
        assert_matches(jax.grad(lambda x: f(x).sum())(x), gradient)
        assert_matches(jax.vmap(jax.grad(lambda x: f(x).sum()))(x[None])[0], gradient)
    np.testing.assert_array_equal(x, before)


@in_operators
@sizes
def test_write_beside_torch_cond_is_returned(size: int):
    x = jnp.linspace(-1.0, 2.0, size)
    before = np.array(x)
    out, mutated = jtbridge.wrap(scaled, return_mutated=True)(x)
    assert_matches(mutated["x"], torch.tensor(before) * 2)
    assert_matches(out, (torch.tensor(before) * 2).sin())
    np.testing.assert_array_equal(x, before)


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:Dynamo detected a call")
@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("rows", [1, 2**8 + 1], ids=["copied", "shared"])
@pytest.mark.parametrize("return_mutated", [False, True])
def test_eager_flex_attention_with_arguments_of_any_size(return_mutated: bool, rows: int):
    x = jnp.linspace(-1.0, 2.0, 256 * rows).reshape(rows, 1, 64, 4)
    before = np.array(x)
    found = jtbridge.wrap(attention, return_mutated=return_mutated)(x)
    if return_mutated:
        found = found[0]
    else:
        np.testing.assert_array_equal(jax.vmap(jtbridge.wrap(attention))(x[None])[0], found)
    assert_matches(found, attention(torch.tensor(before)))
    np.testing.assert_array_equal(x, before)
