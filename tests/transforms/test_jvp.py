"""Forward mode, against the rows of torch's reverse-mode Jacobian."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import TranslationError
from tests import reference
from tests.compare import assert_matches, assert_trees_close

from . import functions
from .problem import MOVING, Problem, jaxes, tensors

# Torch's forward mode needs either a rule or a backward that can be differentiated; these have neither.
NO_FORWARD_MODE = ["once_differentiable", "flash_attention"]
FORWARD_MODE = [name for name in MOVING if name not in NO_FORWARD_MODE]


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_jvp(name: str, backend: str):
    problem = Problem(name)
    tangents = problem.like(problem.primals)
    out, moved = jax.jvp(problem.jax_fn, jaxes(problem.primals), jaxes(tangents))
    assert_matches(out, problem.torch_fn(*tensors(problem.primals)))
    assert_matches(moved, reference.jvp(problem.torch_fn, tensors(problem.primals), tensors(tangents)))


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_jitted_jvp(name: str, backend: str, x64: None):
    problem = Problem(name)
    tangents = problem.like(problem.primals)
    run = jax.jit(lambda primals, tangents: jax.jvp(problem.jax_fn, primals, tangents)[1])
    expected = reference.jvp(problem.torch_fn, tensors(problem.primals), tensors(tangents))
    assert_matches(run(jaxes(problem.primals), jaxes(tangents)), expected)


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_one_argument_moves(name: str, x64: None):
    """Arguments that stand still have no tangent, rather than a zero one."""
    problem = Problem(name)
    primals, tangents = jaxes(problem.primals), problem.like(problem.primals)
    for i, x in enumerate(primals):
        fn = lambda x, i=i: problem.jax_fn(*primals[:i], x, *primals[i + 1 :])  # noqa: E731
        moved = jax.jvp(fn, [x], [jnp.asarray(tangents[i])])[1]
        alone = [t if j == i else torch.zeros_like(t) for j, t in enumerate(tensors(tangents))]
        assert_matches(moved, reference.jvp(problem.torch_fn, tensors(problem.primals), alone))


def test_the_row_for_padding_has_no_tangent(backend: str):
    """As it has no gradient; torch's own forward mode gives it one."""
    wrapped = jtbridge.wrap(
        lambda table: torch.nn.functional.embedding(torch.tensor([2, 0, 1]), table, padding_idx=0), backend=backend
    )
    table = jnp.arange(12.0).reshape(3, 4)
    for run in (wrapped, jax.jit(wrapped)):
        found, moved = jax.jvp(run, [table], [table + 1])
        assert_trees_close(found, table[jnp.array([2, 0, 1])], tolerance=0.0)
        assert_trees_close(moved, (table + 1).at[0].set(0)[jnp.array([2, 0, 1])], tolerance=0.0)


def _positive(x):
    return x @ x.mT + torch.eye(3, dtype=x.dtype)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.cholesky_inverse(torch.linalg.cholesky(_positive(x))),
        lambda x: torch.cholesky_inverse(x.triu() + 2 * torch.eye(3, dtype=x.dtype), upper=True),
        lambda x: torch.triangular_solve(x, x + 3).solution,
        lambda x: torch.linalg.cholesky(_positive(x.detach()) + x / 10),
        lambda x: torch.linalg.eigvalsh(_positive(x.detach()) + x / 10),
    ],
    ids=["cholesky_inverse", "cholesky_inverse of upper", "triangular_solve", "cholesky", "eigvalsh"],
)
def test_where_the_forward_mode_of_torch_is_not_that_of_the_gradient(f, backend: str, x64: None):
    primal, tangent = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = reference.jvp(lambda x: [f(x)], [primal], [tangent])
    wrapped = jtbridge.wrap(f, backend=backend)
    moved = jax.jit(lambda *xs: jax.jvp(wrapped, xs[:1], xs[1:])[1])(*jaxes([primal, tangent]))
    assert_matches([moved], expected)


@pytest.mark.parametrize("name", NO_FORWARD_MODE)
def test_where_torch_has_no_forward_mode(name: str, backend: str):
    problem = Problem(name)
    if name == "flash_attention" and backend != "xla":  # torch's own run goes by rows of the Jacobian
        primals, tangents = jaxes(problem.primals), jaxes(problem.like(problem.primals))
        rows = jax.jacrev(problem.jax_fn, argnums=tuple(range(len(primals))))(*primals)
        _, got = jax.jvp(problem.jax_fn, primals, tangents)
        for result, by in zip(got, rows, strict=True):
            parts = [jnp.tensordot(row, dx, dx.ndim) for row, dx in zip(by, tangents, strict=True)]
            np.testing.assert_allclose(result, sum(parts), rtol=1e-4, atol=1e-5)
        return
    with pytest.raises((RuntimeError, TranslationError), match=r"once_differentiable|is not implemented"):
        jax.jvp(problem.jax_fn, jaxes(problem.primals), jaxes(problem.primals))
    assert_matches(problem.jax_fn(*jaxes(problem.primals)), problem.torch_fn(*tensors(problem.primals)))


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_jit_equals_eager(name: str, backend: str):
    problem = Problem(name)
    primals, tangents = jaxes(problem.primals), jaxes(problem.like(problem.primals))
    run = lambda primals, tangents: jax.jvp(problem.jax_fn, primals, tangents)  # noqa: E731
    assert_trees_close(jax.jit(run)(primals, tangents), run(primals, tangents))


def test_integer_results_have_float0_tangents(backend: str):
    f = jtbridge.wrap(lambda x: (x * 2, (x > 0), x.argsort()))
    x = jnp.array([3.0, -1.0])
    _, (dx, dmask, dorder) = jax.jvp(f, (x,), (jnp.ones(2),))
    assert dx.tolist() == [2, 2]
    assert dmask.dtype == dorder.dtype == jax.dtypes.float0


def test_own_forward_derivative_of_an_autograd_function(backend: str):
    """A function with a `jvp` of its own moves as that says, whatever its backward says."""

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_forward(inputs[0])
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx, grad):
            return 3 * ctx.saved_tensors[0] ** 2 * grad

        @staticmethod
        def jvp(ctx, dx):
            return 3 * ctx.saved_tensors[0] ** 2 * dx

    f = jtbridge.wrap(lambda x: Cube.apply(x))
    assert jax.jvp(f, (jnp.array(2.0),), (jnp.array(1.0),))[1].tolist() == 12
    assert jax.jit(jax.grad(f))(jnp.array(2.0)).tolist() == 12


def test_straight_through_estimator_moves_in_forward_mode(backend: str):
    f = jtbridge.wrap(functions.StraightThrough.apply)
    assert jax.jvp(f, (jnp.array(1.3),), (jnp.array(5.0),))[1].tolist() == 5


@pytest.mark.parametrize("by", ["xla", "dlpack", "callback"])
def test_logcumsumexp_by_two_reverse_modes(by: str, x64: None):
    """Torch's backward of it takes the logarithm of the cotangent, so it may not be differentiated at zero."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():  # autograd inside keeps jtbridge from torch's forward mode
            u = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(u.sin().sum(), u, create_graph=True)
        return torch.logcumsumexp(x, -1) * slope.detach()

    x, dx = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, 2.0, -0.5], dtype=torch.float64)
    moved = jax.jvp(jtbridge.wrap(fn, backend=by), jaxes([x]), jaxes([dx]))[1]
    (expected,) = reference.jvp(lambda x: [fn(x)], [x], [dx])
    assert_matches(moved, expected)
