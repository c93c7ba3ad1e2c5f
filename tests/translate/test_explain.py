"""`explain` names the chosen backend, why backends before it were not chosen, and the parts of the function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from tests.counting import counted_square

X = jnp.ones((2, 3))


def test_a_translated_function():
    weight = torch.ones(400, 3)

    def fn(x, i):
        x.add_(1)
        return torch.nn.functional.dropout(weight[i] @ x.double().float().T, 0.5)

    report = jtbridge.explain(fn, X, jnp.zeros(4, jnp.int32), rng=jax.random.key(0))
    assert report.function == "fn(x: float32[2, 3], i: int32[4])"
    assert (report.backend, report.gradient) == ("xla", "xla")
    assert report.reasons == {"triton": 'it needs a GPU, the platform is "cpu"'}
    assert report.operators["aten.mm.default"] == 1
    assert report.random == ("aten.bernoulli.p",)
    assert report.mutated == ("x",)
    assert report.casts == {"int32 -> int64": 1, "float32 -> float64": 1, "float64 -> float32": 1}
    assert report.constants == (1, 4800)
    assert 0 < report.seconds < 60


def test_reason_against_translation_has_its_line():
    def fn(x):
        return x * x.sum().item()  # here

    report = jtbridge.explain(fn, X)
    assert report.backend == "dlpack"
    assert "aten._local_scalar_dense.default" in report.reasons["xla"]
    assert f"{__file__}:{fn.__code__.co_firstlineno + 1}" in report.reasons["xla"]
    assert str(report.gradient).startswith("dlpack, for `fn` cannot be traced")


def test_a_gradient_that_is_called_though_the_function_is_translated():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return counted_square(grad)

    report = jtbridge.explain(jtbridge.wrap(Square.apply, islands="never"), X)
    assert report.backend == "xla"
    assert "jtbridge_tests.counted_square.default" in str(report.gradient)


def test_a_named_backend_and_ordered_effects():
    assert jtbridge.explain(jtbridge.wrap(torch.sin, backend="callback"), X).backend == "callback"
    assert jtbridge.explain(jtbridge.wrap(torch.sin, effects="ordered"), X).backend == "io_callback, in order"


@torch.library.custom_op("jtbridge_explain_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@halved.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("jtbridge_explain_tests::halve_", mutates_args=("x",))
def halve_(x: torch.Tensor) -> None:
    x.div_(2)


@torch.library.triton_op("jtbridge_explain_tests::of_parts", mutates_args={})
def of_parts(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


@torch.library.triton_op("jtbridge_explain_tests::of_unknown_parts", mutates_args={})
def of_unknown_parts(x: torch.Tensor) -> torch.Tensor:
    return halved(x) + 1


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return grad


def written(x):
    halve_(x)
    return x


_CONV = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4).eval(), torch.nn.MaxPool2d(2))
_LSTM = torch.nn.LSTM(3, 4)
_TESTS = "jtbridge_explain_tests"


@pytest.mark.parametrize(
    ("function", "shape", "decomposed", "missing"),
    [
        (_CONV, (1, 3, 8, 8), (), ()),
        (lambda x: _LSTM(x)[0], (2, 3), (), ()),
        (lambda x: torch.fft.irfft(torch.fft.rfft(x), 3), (2, 3), (), ()),
        (lambda x: torch.linalg.svd(x)[1].sum() + torch.linalg.pinv(x).T, (2, 3), (), ()),
        (lambda x: x.index_add(0, torch.tensor([0]), x[:1]).masked_fill(x > 0, 1), (2, 3), (), ()),
        (Cube.apply, (2, 3), (), ()),
        (torch.vmap(torch.func.grad(lambda row: (row**2).sum())), (2, 3), (), ()),
        (torch.nn.functional.dropout, (2, 3), (), ()),
        (lambda x: (halved(x), x + 1)[1], (2, 3), (), ()),  # the result is not used
        (lambda x: x + torch.kaiser_window(3), (2, 3), (), ()),  # a constant
        (lambda x: torch.nn.functional.rms_norm(x, (3,)), (2, 3), (), ()),  # not fused: a CPU has no kernels
        (of_parts, (2, 3), (f"{_TESTS}.of_parts.default",), ()),
        (of_unknown_parts, (2, 3), (f"{_TESTS}.of_unknown_parts.default",), (f"{_TESTS}.halved.default",)),
        (lambda x: halved(x) + halved(torch.ones(3)), (2, 3), (), (f"{_TESTS}.halved.default",)),
        (written, (2, 3), (), (f"{_TESTS}.halve_.default",)),
        (lambda x: x.to_sparse().to_dense(), (2, 3), (), ("aten._to_dense.default", "aten._to_sparse.default")),
    ],
)
def test_operators_are_listed_as_translated(function, shape, decomposed, missing):
    report = jtbridge.explain(function, jnp.ones(shape), rng=jax.random.key(0))
    assert (report.decomposed, report.missing) == (decomposed, missing)
    assert report.backend == ("dlpack" if missing else "xla")
    assert ("xla" in report.reasons) == bool(missing)
    assert not missing or any(f"`{name}`" in report.reasons["xla"] for name in missing)
    assert set(decomposed) <= set(report.operators or ())
    assert f"no lowering    {', '.join(missing) or 'none'}" in str(report)


def test_a_function_without_a_graph_has_no_list_of_operators():
    report = jtbridge.explain(lambda x: x[x > 0].sum(), X)
    assert (report.operators, report.decomposed, report.missing) == (None, (), ())
    assert "operators      no graph" in str(report)
    assert "decomposed" not in str(report)


def test_show_prints_the_report(capsys):
    report = jtbridge.explain(torch.sin, X)
    report.show()
    assert capsys.readouterr().out == f"{report}\n"  # plain, for this is no terminal
    assert str(report).splitlines()[1:3] == ["eager call     torch itself", "inside jit     xla"]
    named = jtbridge.explain(jtbridge.wrap(torch.sin, backend="xla"), X)
    assert named.eager == "xla, as under jax.jit: backend='xla' was asked for"
    assert repr(report) == str(report)


def test_integer_function_has_no_gradient():
    assert jtbridge.explain(lambda i: i + 1, jnp.arange(3)).gradient is None


def test_dropout_with_probability_zero_is_not_random():
    def attend(q, p):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=p)

    q = jnp.ones((1, 2, 3, 4))
    assert jtbridge.explain(attend, q, 0.0).random == ()
    assert jtbridge.explain(attend, q, 0.5, rng=jax.random.key(0)).random != ()


def test_strategies_that_were_tried_are_listed_in_order():
    assert [str(trial) for trial in jtbridge.explain(torch.sin, jnp.ones(3)).trials] == ["fake tensors"]

    def in_numpy(x):
        return torch.from_numpy(np.sin(x.numpy()))

    trials = jtbridge.explain(in_numpy, jnp.ones(3)).trials
    assert [trial.strategy for trial in trials] == ["fake tensors", "example values"]
    assert ".numpy()" in trials[0].failure
    assert "test_explain.py" in trials[0].failure
    assert trials[1].failure is None


def test_overrides_are_tried_where_sizes_depend_on_data():
    def positive_sum(x):
        return x[x > 0].sum()

    trials = jtbridge.explain(positive_sum, jnp.ones(3)).trials
    assert [trial.strategy for trial in trials] == [
        "fake tensors",
        "fake tensors, with overrides",
        "symbolic sizes and values",
    ]
    assert all("aten.nonzero.default" in trial.failure for trial in trials[:2])


def test_jitted_functions_and_shapes_in_place_of_arrays():
    f, net = jtbridge.wrap(lambda x: x.sin()), jtbridge.module(torch.nn.Linear(3, 1))
    assert jtbridge.explain(jax.jit(f), jax.ShapeDtypeStruct((2,), jnp.float32)).function == "<lambda>(x: float32[2])"
    assert jtbridge.explain(jax.jit(net), *net.init(), X).backend == "xla"
