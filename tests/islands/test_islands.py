"""Operators that torch runs inside translated programs."""

from __future__ import annotations

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, PartitionSpec

import jtbridge
from jtbridge._compat import FakeTensor
from jtbridge.errors import (
    CalledWarning,
    DifferentiationError,
    SequentialVmapWarning,
    TranslationError,
)
from tests.compare import assert_matches, assert_trees_close
from tests.counting import counted, counted_square

from .operators import around, bent, joined, largest, lies, raises, scratching, scratching_numpy, strides
from .programs import CALL, PLAIN, F, T, X, calls_in, scalar, sharded


def test_one_operator_is_called_and_the_others_are_translated():
    f = jtbridge.wrap(F)
    text = jax.jit(f).lower(X).as_text()
    assert text.count(CALL) == 1
    assert "stablehlo.sine" in text
    assert "stablehlo.cosine" in text
    assert_matches(jax.jit(f)(X), F(T))
    assert_matches(f(X), F(T))


def test_no_warning_says_that_the_function_is_called():
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalledWarning)
        jax.jit(jax.grad(lambda x: jtbridge.wrap(F)(x).sum()))(X)


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd, jax.hessian])
def test_an_operator_without_a_derivative_is_refused_before_the_program_runs(transform):
    f = jax.jit(transform(scalar(jtbridge.wrap(lambda x: joined([x, x.sin()], None, "ab")[0].cos()))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(DifferentiationError, match="no autograd formula was registered"):
            f.lower(X)


@pytest.mark.parametrize("options", [{}, {"islands": "needed"}, {"backend": "dlpack"}], ids=str)
@pytest.mark.parametrize("operator", [scratching, scratching_numpy])
def test_operator_that_writes_to_its_argument_is_refused(operator, options):
    f = jax.jit(jtbridge.wrap(lambda x: operator(x).sin(), **options))
    x = jnp.zeros((2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalledWarning)
        with pytest.raises(Exception, match="writes to an argument that its schema does not declare"):
            jax.block_until_ready(f(x))
    np.testing.assert_array_equal(x, np.zeros((2, 3)))


@pytest.mark.parametrize("operator", [scratching, scratching_numpy])
def test_an_island_that_writes_to_an_intermediate_result_changes_no_array(operator):
    """XLA may give the island the memory of the argument, because `x * 1` is `x`."""
    f = jax.jit(jtbridge.wrap(lambda x: operator(x * 1).sin(), islands="needed"))
    x = jnp.zeros((2, 3))
    with pytest.raises(Exception, match="writes to an argument that its schema does not declare"):
        jax.block_until_ready(f(x))
    np.testing.assert_array_equal(x, np.zeros((2, 3)))


TRANSFORMED = {
    "grad": (lambda f: jax.grad(scalar(f)), lambda f: torch.func.grad(scalar(f))),
    "jvp": (
        lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
        lambda f: lambda t: torch.func.jvp(f, (t,), (t.cos(),)),
    ),
    "hessian": (lambda f: jax.hessian(scalar(f)), lambda f: torch.func.jacrev(torch.func.grad(scalar(f)))),
    "jacfwd of grad": (
        lambda f: jax.jacfwd(jax.grad(scalar(f))),
        lambda f: torch.func.jacrev(torch.func.grad(scalar(f))),
    ),
    "jacrev": (lambda f: jax.jacrev(f), lambda f: torch.func.jacrev(f)),
    "vmap": (lambda f: jax.vmap(f), lambda f: f),
    "vmap over columns": (lambda f: lambda x: jax.vmap(f, in_axes=1)(x), lambda f: lambda t: f(t.T)),
    "vmap of grad": (lambda f: jax.vmap(jax.grad(f)), lambda f: torch.func.grad(scalar(f))),
    "checkpoint": (
        lambda f: jax.grad(scalar(jax.checkpoint(f))),
        lambda f: torch.func.grad(scalar(f)),
    ),
    "checkpoint with a policy": (
        lambda f: jax.grad(scalar(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable))),
        lambda f: torch.func.grad(scalar(f)),
    ),
    "scan": (
        lambda f: lambda x: jax.lax.scan(lambda c, row: (c + f(row), f(row)), jnp.float32(0), x),
        lambda f: lambda t: (f(t).sum(), f(t)),
    ),
    "grad of scan": (
        lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, row: (c + f(row), None), jnp.float32(0), x)[0]),
        lambda f: torch.func.grad(scalar(f)),
    ),
    "vmap of scan": (
        lambda f: jax.vmap(lambda row: jax.lax.scan(lambda c, _: (c + f(row), None), jnp.float32(0), None, 2)[0]),
        lambda f: lambda t: 2 * f(t),
    ),
    "cond": (
        lambda f: lambda x: jax.lax.cond(x[0, 0] < 0, f, lambda y: y.sum(-1), x),
        lambda f: f,
    ),
    "map": (lambda f: lambda x: jax.lax.map(f, x), lambda f: f),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations_match_torch(name):
    ours, theirs = TRANSFORMED[name]
    function = ours(jtbridge.wrap(F))
    expected = theirs(PLAIN)(T)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalledWarning)
        assert calls_in(function, X) > 0
    assert_matches(jax.jit(function)(X), expected, 1e-5)
    assert_matches(function(X), expected, 1e-5)


def test_a_batch_is_one_call_of_the_operators_batching_rule():
    f = jtbridge.wrap(around(counted_square))
    batched = jax.jit(jax.vmap(f))
    batched.lower(X)
    compiled = batched.lower(X).compile()
    with counted() as counts:
        assert_matches(compiled(X), around(counted_square)(T))
    assert counts["batched"] >= 1
    assert calls_in(jax.vmap(f), X) == 1


def test_gradient_and_forward_run_the_operator_once_each():
    f = jtbridge.wrap(around(counted_square))
    compiled = jax.jit(jax.value_and_grad(scalar(f))).lower(X).compile()
    with counted() as counts:
        jax.block_until_ready(compiled(X))
    assert counts == {"forward": 1, "backward": 1}


def test_unused_island_results_are_not_returned_to_xla():
    def fn(x):
        values, indices, _ = largest(torch.sin(x) * 3 + x)
        return values.cos() * 2, indices + 1

    f = jtbridge.wrap(fn, islands="needed")
    text = jax.jit(f).lower(X).as_text()
    (line,) = [line for line in text.splitlines() if CALL in line]
    assert re.search(r"-> \(tensor<3xf32>, tensor<3xi64>\)", line) or "tuple<tensor<3xf32>, tensor<3xi64>>" in line
    assert_matches(jax.jit(f)(X), fn(T))
    only = jtbridge.wrap(lambda x: fn(x)[1] * 2 - 3, islands="needed")
    assert_matches(jax.jit(only)(X), fn(T)[1] * 2 - 3)


def combined(t):
    total, less = joined([t + 1, t * 2], None, "ab")
    return total * 3 - less


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "int32", "uint8"])
def test_dtypes_while_x64_is_off(dtype):
    x = jnp.arange(6).reshape(2, 3).astype(dtype)
    t = torch.arange(6).reshape(2, 3).to(torch.int64 if dtype == "int32" else getattr(torch, dtype))
    fn = combined if dtype in ("int32", "uint8") else around(bent, 2.0)
    assert calls_in(jtbridge.wrap(fn, islands="needed"), x) == 1
    assert_matches(jax.jit(jtbridge.wrap(fn, islands="needed"))(x), fn(t), 2e-2 if dtype == "float16" else None)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_dtypes_while_x64_is_on(dtype):
    x, t = X.astype(dtype), T.to(getattr(torch, dtype))
    assert_matches(jax.jit(jtbridge.wrap(F))(x), F(t))
    if dtype == "float64":
        assert_matches(jax.jit(jax.grad(scalar(jtbridge.wrap(F))))(x), torch.func.grad(scalar(PLAIN))(t))


def test_torch_computes_in_64_bits_inside_while_jax_has_32():
    def fn(x):
        wide = bent(x.double() * 1e30 + 1, 1.0)  # beyond float32
        return ((wide / 1e90).float() + x.sin() * 2 - 1).cos()

    f = jtbridge.wrap(fn, islands="needed")
    assert calls_in(f, X) == 1
    assert_matches(jax.jit(f)(X), fn(T))
    assert_matches(jax.jit(jax.vmap(f))(X), fn(T))


def test_nan_and_infinity_and_negative_zero():
    x = jnp.array([[jnp.nan, jnp.inf, -jnp.inf, -0.0]])
    fn = lambda t: bent(t * 1 + 0 * t, 2.0).cos() * 0 + bent(t * 1.0, 1.0) * 1 - (-t)  # noqa: E731
    t = torch.tensor(np.asarray(x))
    np.testing.assert_array_equal(jax.jit(jtbridge.wrap(fn, islands="needed"))(x), fn(t).numpy())


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_arrays_without_elements(shape):
    x, t = jnp.zeros(shape), torch.zeros(shape)
    f = jtbridge.wrap(F)
    assert_matches(jax.jit(f)(x), F(t))
    assert_matches(jax.jit(jax.grad(scalar(f)))(x), torch.func.grad(scalar(PLAIN))(t))
    assert jax.jit(jax.vmap(f))(jnp.zeros((0, 3, 4))).shape == (0, 3)


def test_scalars():
    fn = lambda t: bent(t.sin() * 2, 0.5).cos() + t  # noqa: E731
    assert_matches(jax.jit(jtbridge.wrap(fn, islands="needed"))(jnp.float32(0.3)), fn(torch.tensor(0.3)))


def test_lists_optional_tensors_and_strings():
    def fn(x):
        first, second = joined([x.sin(), x.cos() * 2], x + 1, "abc")
        plain, _ = joined([x * 2], None, "a")
        return (first - second).tanh() + plain.exp() * 0.5 - x

    f = jtbridge.wrap(fn, islands="needed")
    assert calls_in(f, X) == 2
    assert_matches(jax.jit(f)(X), fn(T))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.sin().T,
        lambda x: x.sin()[:, ::2],
        lambda x: x.sin()[:, :1].expand(3, 5),
        lambda x: x.sin().unfold(1, 2, 2),
        lambda x: x.sin().to(memory_format=torch.contiguous_format),
    ],
    ids=["transposed", "every second", "expanded", "unfolded", "contiguous"],
)
def test_custom_operator_gets_the_same_strides_as_in_torch(view):
    def fn(x):
        return strides(view(x)) * 2 + 1

    f = jtbridge.wrap(fn, islands="needed")
    assert calls_in(f, X) == 1
    assert_matches(jax.jit(f)(X), fn(T))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SequentialVmapWarning)
        batch = jax.jit(jax.vmap(f))(jnp.stack([X, X + 1]))
    assert_matches(batch, torch.stack([fn(T), fn(T + 1)]))


def test_weights_that_are_closed_over():
    weight = torch.linspace(0, 1, 4)

    def fn(x):
        return (joined([x * weight, weight.expand(3, 4)], weight * 2, "w")[0].cos() * weight + x).sum()

    f = jtbridge.wrap(fn, islands="needed")
    assert calls_in(f, X) == 1
    assert_matches(jax.jit(f)(X), fn(T))


def test_a_lowering_that_refuses_its_arguments_makes_an_island():
    @torch.library.custom_op("jtbridge_island_tests::picky", mutates_args=())
    def picky(x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by

    picky.register_fake(lambda x, by: torch.empty_like(x))

    @jtbridge.register_lowering(picky)
    def _(x, by):
        if by > 1:
            raise TranslationError("it takes small numbers only")
        return x * by

    def fn(x):
        return (picky(x.sin() * 2, 0.5) + picky(x, 2.0)).cos()

    f = jtbridge.wrap(fn)
    assert calls_in(f, X) == 1
    assert_matches(jax.jit(f)(X), fn(T))
    assert jtbridge.explain(f, X).islands[0].reason.endswith("cannot be translated here: it takes small numbers only")


def test_operator_that_returns_an_undeclared_shape_raises():
    f = jax.jit(jtbridge.wrap(around(lies)))
    with pytest.raises(Exception, match=r"`jtbridge_island_tests.lies.default` returned a torch.float32 tensor of"):
        jax.block_until_ready(f(jnp.ones((3, 4))))


def test_an_error_of_the_operator_reaches_the_caller():
    f = jax.jit(jtbridge.wrap(around(raises)))
    with pytest.raises(Exception, match="the operator does not like this"):
        jax.block_until_ready(f(X))


def test_each_device_of_a_shard_map_runs_the_island_on_its_shard():
    x = jnp.linspace(-1, 1, 32).reshape(8, 4)
    t = torch.tensor(np.asarray(x))
    mesh = Mesh(np.array(jax.devices()[:4]), ("rows",))
    spec = PartitionSpec("rows")
    f = jax.shard_map(jtbridge.wrap(F), mesh=mesh, in_specs=spec, out_specs=spec)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalledWarning)
        assert calls_in(f, sharded(x)) == 1
    assert_matches(jax.jit(f)(sharded(x)), F(t))
    assert_matches(jax.jit(jax.grad(scalar(f)))(sharded(x)), torch.func.grad(scalar(PLAIN))(t))


def test_verification_compares_the_whole_program():
    f = jtbridge.wrap(F, verify=True)
    assert_matches(jax.jit(f)(X), F(T))
    jax.effects_barrier()

    def differs(x):
        return F(x) + (1 if torch.compiler.is_exporting() or isinstance(x, FakeTensor) else 0)

    def run():
        jax.block_until_ready(jax.jit(jtbridge.wrap(differs, verify=True))(X))
        jax.effects_barrier()

    with pytest.raises(Exception, match="differs from torch's"):
        run()


def test_two_traces_lower_to_the_same_program():
    texts = {jax.jit(lambda x: jtbridge.wrap(F)(x)).lower(X).as_text() for _ in range(2)}
    assert len(texts) == 1


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return x + self.outer(torch.tanh(bent(self.inner(x), 0.5)))


@pytest.mark.parametrize("blocks", ["inline", "call", "scan"])
def test_islands_in_repeated_blocks_of_a_module(blocks):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Layer() for _ in range(5)])
    net = jtbridge.module(model, repeated_blocks=blocks, islands="needed")
    params, state = net.init()
    loss = lambda params, x: net(params, state, x)[0].sum()  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalledWarning)
        value, gradient = jax.jit(jax.value_and_grad(loss))(params, X)
    result = model(T).sum()
    result.backward()
    np.testing.assert_allclose(value, result.detach(), rtol=1e-5)
    expected = {name: jnp.asarray(p.grad.numpy()) for name, p in model.named_parameters() if p.grad is not None}
    assert_trees_close(dict(gradient), expected, 1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalledWarning)
        if blocks == "call":
            text = jax.jit(lambda p, x: net(p, state, x)[0]).lower(params, X).as_text()
            assert text.count(CALL) < 5


def test_islands_on_several_threads_at_once():
    def fn(x):
        parts = [bent((x + i).sin() * 2, 0.5).cos() for i in range(6)]
        return sum(parts)

    f = jax.jit(jtbridge.wrap(fn, islands="needed"))
    x = jnp.linspace(-1, 1, 4096).reshape(64, 64)
    expected = fn(torch.tensor(np.asarray(x)))
    for _ in range(20):
        assert_matches(f(x), expected)


def test_explain_lists_islands():
    report = jtbridge.explain(jtbridge.wrap(F), X)
    assert report.backend == "xla"
    island, of_gradient = report.islands
    assert (island.operator, island.count, island.gradient) == ("jtbridge_island_tests.bent.default", 1, False)
    assert of_gradient.operator == "jtbridge_island_tests.bent_backward.default"
    assert of_gradient.gradient
    assert island.inputs == ("float32[3, 4]",)
    assert island.results == ("float32[3, 4]",)
    assert island.bytes == 96
    assert "has no lowering" in island.reason
    assert "register_lowering(torch.ops.jtbridge_island_tests.bent.default)" in island.reason
    assert "islands" in str(report)
    assert jtbridge.explain(torch.sin, X).islands == ()
    assert jtbridge.explain(jtbridge.wrap(F, islands="never"), X).islands == ()
