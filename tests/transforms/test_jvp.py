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

# Torch's forward mode needs either a rule or a backward that can be differentiated; in torch these have neither.
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
def test_tangent_of_one_argument(name: str, x64: None):
    """Arguments that are not differentiated have no tangent, instead of a zero tangent."""
    problem = Problem(name)
    primals, tangents = jaxes(problem.primals), problem.like(problem.primals)
    for i, x in enumerate(primals):
        fn = lambda x, i=i: problem.jax_fn(*primals[:i], x, *primals[i + 1 :])  # noqa: E731
        moved = jax.jvp(fn, [x], [jnp.asarray(tangents[i])])[1]
        alone = [t if j == i else torch.zeros_like(t) for j, t in enumerate(tensors(tangents))]
        assert_matches(moved, reference.jvp(problem.torch_fn, tensors(problem.primals), alone))


def test_the_row_for_padding_has_no_tangent(backend: str):
    """The row has no gradient either, but torch's forward mode gives it a tangent."""
    wrapped = jtbridge.wrap(
        lambda table: torch.nn.functional.embedding(torch.tensor([2, 0, 1]), table, padding_idx=0), backend=backend
    )
    table = jnp.arange(12.0).reshape(3, 4)
    for run in (wrapped, jax.jit(wrapped)):
        found, moved = jax.jvp(run, [table], [table + 1])
        assert_trees_close(found, table[jnp.array([2, 0, 1])], tolerance=0.0)
        assert_trees_close(moved, (table + 1).at[0].set(0)[jnp.array([2, 0, 1])], tolerance=0.0)


@pytest.mark.parametrize("name", NO_FORWARD_MODE)
def test_operators_without_forward_mode_in_torch(name: str, backend: str):
    problem = Problem(name)
    if name == "flash_attention":  # by rows of the Jacobian, or written out
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


def test_integer_results_have_float0_tangents(backend: str):
    f = jtbridge.wrap(lambda x: (x * 2, (x > 0), x.argsort()))
    x = jnp.array([3.0, -1.0])
    _, (dx, dmask, dorder) = jax.jvp(f, (x,), (jnp.ones(2),))
    assert dx.tolist() == [2, 2]
    assert dmask.dtype == dorder.dtype == jax.dtypes.float0


def test_custom_forward_derivative_of_an_autograd_function(backend: str):
    """A function with a custom `jvp` uses it for forward mode, whatever its backward computes."""

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


def test_straight_through_estimator_has_a_forward_derivative(backend: str):
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


_MATRIX = np.array([[4.0, 0.5, -1.0], [0.5, 3.0, 0.3], [-1.0, 0.3, 5.0]])
# Torch's forward mode is wrong for these.
_ONE_TRIANGLE = {
    "cholesky_inverse": lambda a: torch.cholesky_inverse(a),
    "cholesky_inverse, upper": lambda a: torch.cholesky_inverse(a, upper=True),
    "triangular_solve": lambda a: torch.triangular_solve(torch.eye(3, 2, dtype=a.dtype), a).solution,
}


@pytest.mark.parametrize("name", _ONE_TRIANGLE)
@pytest.mark.parametrize("jitted", [False, True])
def test_tangents_of_the_whole_matrix(name: str, jitted: bool, backend: str, x64: None):
    fn = _ONE_TRIANGLE[name]
    f = jtbridge.wrap(fn)
    tangent = np.random.default_rng(0).normal(size=(3, 3))
    run = jax.jit(lambda a, da: jax.jvp(f, (a,), (da,))[1]) if jitted else lambda a, da: jax.jvp(f, (a,), (da,))[1]
    rows = torch.autograd.functional.jacobian(fn, torch.from_numpy(_MATRIX))
    expected = (rows * torch.from_numpy(tangent)).sum((-2, -1))
    np.testing.assert_allclose(run(jnp.asarray(_MATRIX), jnp.asarray(tangent)), expected, rtol=1e-9, atol=1e-12)


def _columns_apart(x: torch.Tensor) -> torch.Tensor:
    return (x * torch.arange(9.0, dtype=x.dtype).view(3, 3)).cumsum(-1)


# Torch's forward mode transposes the tangent of the tensor that these are views of.
_IN_PLACE = {
    "transpose_": lambda view: view.transpose_(0, 1),
    "t_": lambda view: view.t_(),
    "swapaxes_": lambda view: view.swapaxes_(0, 1),
    "swapdims_": lambda view: view.swapdims_(0, 1),
    "squeeze_": lambda view: view.unsqueeze(0).squeeze_(),
    "squeeze_, dimension": lambda view: view.unsqueeze(0).squeeze_(0),
    "squeeze_, dimensions": lambda view: view[None, None].squeeze_((0, 1)),
    "unsqueeze_": lambda view: view.unsqueeze_(0),
    "as_strided_": lambda view: view.as_strided_((3, 3), (1, 3)),
}


@pytest.mark.parametrize("name", _IN_PLACE)
@pytest.mark.parametrize("jitted", [False, True])
def test_views_changed_in_place(name: str, jitted: bool, backend: str, x64: None):
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = _columns_apart(x)
        changed = _IN_PLACE[name](y[...].add_(1.28))
        return _columns_apart(y), changed.sin()

    x = torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3)
    dx = torch.tensor([[1.0, 2.0, -1.0], [0.5, 3.0, -2.0], [4.0, -0.3, 0.7]], dtype=torch.float64)
    f = jtbridge.wrap(fn)
    run = jax.jit(lambda x, dx: jax.jvp(f, (x,), (dx,))[1]) if jitted else lambda x, dx: jax.jvp(f, (x,), (dx,))[1]
    got = run(*jaxes([x, dx]))
    for result, rows in zip(got, torch.autograd.functional.jacobian(fn, x), strict=True):
        np.testing.assert_allclose(result, (rows * dx).sum((-2, -1)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", ["frac", "fmod", "remainder", "native_dropout", "view_copy", "squeeze_copy"])
def test_results_whose_argument_is_written_to(name: str, jitted: bool, backend: str, x64: None):
    """Torch's forward mode gives the argument and the result one tangent, in one memory."""
    operator = {
        "frac": torch.frac,
        "fmod": lambda x: torch.fmod(x, 0.7),
        "remainder": lambda x: x % 0.7,
        "native_dropout": lambda x: torch.native_dropout(x, 0.5, train=False)[0],
        "view_copy": lambda x: torch.view_copy(x, (3, 2)),
        "squeeze_copy": torch.squeeze_copy,
    }[name]

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        result = operator(y)
        y.mul_(-5)
        return result, y

    x, dx = jnp.linspace(-1, 1, 6).reshape(2, 3), jnp.arange(6.0).reshape(2, 3)
    f = jtbridge.wrap(fn)
    run = jax.jit(lambda x, dx: jax.jvp(f, (x,), (dx,))[1]) if jitted else lambda x, dx: jax.jvp(f, (x,), (dx,))[1]
    for value, expected in zip(jax.jit(f)(x), fn(torch.from_numpy(np.array(x))), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-12)
    moved, written = run(x, dx)
    np.testing.assert_allclose(moved.reshape(2, 3), 2 * dx, rtol=1e-12)
    np.testing.assert_allclose(written, -10 * dx, rtol=1e-12)


def test_cholesky_inverse_by_differences(backend: str, x64: None):
    f = jtbridge.wrap(lambda a: torch.cholesky_inverse(torch.linalg.cholesky(a)))
    tangent = np.random.default_rng(0).normal(size=(3, 3))
    tangent = tangent + tangent.T
    moved = jax.jit(lambda da: jax.jvp(f, (jnp.asarray(_MATRIX),), (da,))[1])(tangent)
    inverse = np.linalg.inv(_MATRIX)
    np.testing.assert_allclose(moved, -inverse @ tangent @ inverse, rtol=1e-9)


@pytest.mark.parametrize("how", ["jvp", "jacfwd", "vmap of jvp", "jvp of vmap", "jitted"])
def test_a_norm_at_zero(how: str, backend: str, x64: None):
    """The gradient is 0 there. Torch's derivative of that gradient is NaN."""
    f = jtbridge.wrap(lambda x: torch.linalg.vector_norm(x, 3, dim=-1))
    x = jnp.array([[0.0, 0.0], [1.0, 2.0]])
    tangent = jnp.array([[1.0, -1.0], [0.5, 0.25]])
    gradient = np.array([1.0, 4.0]) / 9 ** (2 / 3)
    expected = np.array([0.0, gradient @ np.array([0.5, 0.25])])

    def jvp(x, dx):
        return jax.jvp(f, (x,), (dx,))[1]

    if how == "jacfwd":
        jacobian = jax.jacfwd(f)(x)
        assert jacobian.shape == (2, 2, 2)
        np.testing.assert_allclose(jacobian[1, 1], gradient, rtol=1e-12)
        np.testing.assert_array_equal(jacobian[0], 0)
        np.testing.assert_array_equal(jacobian[1, 0], 0)
        return
    run = {
        "jvp": jvp,
        "vmap of jvp": jax.vmap(jvp),
        "jvp of vmap": lambda x, dx: jax.jvp(jax.vmap(f), (x,), (dx,))[1],
        "jitted": jax.jit(jvp),
    }[how]
    np.testing.assert_allclose(run(x, tangent), expected, rtol=1e-12)


def test_nan_in_the_argument_propagates(backend: str):
    f = jtbridge.wrap(lambda x: torch.linalg.vector_norm(x, 3, dim=-1))
    x = jnp.array([[jnp.nan, 0.0], [1.0, 2.0]])
    moved = jax.jvp(f, (x,), (jnp.ones_like(x),))[1]
    assert np.isnan(moved[0])
    assert np.isfinite(moved[1])


def test_a_complex_result_from_the_rows_of_a_jacobian(x64: None):
    f = jtbridge.wrap(lambda x: torch.complex(torch.linalg.vector_norm(x, 3), x.prod()) * (2 - 1j))
    x, tangent = jnp.array([0.0, 0.0]), jnp.array([1.0, -1.0])
    np.testing.assert_allclose(jax.jvp(f, (x,), (tangent,))[1], 0)
    x = jnp.zeros((2, 2)).at[1].set(jnp.array([3.0, 2.0]))
    g = jtbridge.wrap(lambda x: torch.linalg.vector_norm(x, 3, dim=-1) * (2 - 1j) + 1j * x.prod(-1))
    moved = jax.jvp(g, (x,), (jnp.array([[1.0, 1.0], [0.5, -1.0]]),))[1]
    norm = (9 * 0.5 - 4) / 35 ** (2 / 3)
    np.testing.assert_allclose(moved, [0, norm * (2 - 1j) + 1j * (0.5 * 2 - 3)], rtol=1e-12)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("by", ["auto", "dlpack", "callback"])
def test_a_gradient_that_only_real_tensors_have(jitted: bool, by: str):
    """On tensors without values torch's autograd cannot take the view again from its transposed base."""

    def fn(x):
        y = x * 1
        part = y.flatten()[::2]
        y.t_()
        part[0] += 1
        return y

    run = lambda x, dx: jax.jvp(jtbridge.wrap(fn, backend=by), (x,), (dx,))[1]  # noqa: E731
    moved = (jax.jit(run) if jitted else run)(jnp.ones((3, 3)), jnp.arange(9.0).reshape(3, 3))
    np.testing.assert_array_equal(moved, np.arange(9.0).reshape(3, 3).T)


@pytest.mark.parametrize("by", ["eager", "dlpack", "callback"])
def test_two_reverse_modes_where_the_second_is_nan(by: str, x64: None):
    """The gradient of sinc at 0 is 0, and torch's derivative of that gradient is NaN."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():  # autograd inside keeps jtbridge from torch's forward mode
            u = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(u.cos().sum(), u)
        return torch.sinc(x - 1) + slope

    f = jtbridge.wrap(fn, backend="auto" if by == "eager" else by)
    run = lambda x, dx: jax.jvp(f, (x,), (dx,))[1]  # noqa: E731
    x, dx = jnp.array([1.0, 0.25]), jnp.array([2.0, -1.0])
    moved = (run if by == "eager" else jax.jit(run))(x, dx)
    t = np.pi * -0.75
    slope = np.pi * (np.cos(t) * t - np.sin(t)) / t**2
    np.testing.assert_allclose(moved, [0, -slope], rtol=1e-9)


@pytest.mark.parametrize("by", ["eager", "jit"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.filterwarnings("error::jtbridge.errors.CalledWarning")
def test_the_tangent_of_a_number_times_an_element_has_the_dtype_of_the_element(by: str, dtype: type):
    f = jtbridge.wrap(lambda x: 1.5 * (x[0] * x[0]) - 0.5 * x[1].pow(2.0))
    derivative = jax.jacfwd(f) if by == "eager" else jax.jit(jax.jacfwd(f))
    with jax.enable_x64(dtype is np.float64):
        found = derivative(jnp.asarray([0.5, -0.25, 0.75], dtype))
    assert found.dtype == dtype
    np.testing.assert_allclose(found, [1.5, 0.25, 0.0], rtol=1e-3 if dtype is np.float16 else 1e-6)


@pytest.mark.parametrize("jitted", [False, True])
def test_a_complex_number_from_products_with_numbers(jitted: bool, backend: str):
    """Torch's forward mode makes a float64 tangent of such a product."""
    f = jtbridge.wrap(lambda x: torch.complex(x.amax(), x.amax() * -0.25))
    run = lambda x, dx: jax.jvp(f, (x,), (dx,))[1]  # noqa: E731
    moved = (jax.jit(run) if jitted else run)(jnp.array([1.0, 3.0, 2.0]), jnp.array([1.0, 2.0, 3.0]))
    assert moved.dtype == jnp.complex64
    np.testing.assert_allclose(moved, 2 - 0.5j, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
@pytest.mark.parametrize("by", ["auto", "dlpack", "callback"])
def test_a_gradient_that_torch_fails_to_differentiate(by: str):
    """The gradient of a write to a base reads the base through a view that does not exist for other strides."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.logcumsumexp(x, 1).clone()
        flat = y.view(-1)
        y[0] = 0.5
        with torch.no_grad():  # it keeps jtbridge from torch's forward mode
            y.sin()
        return flat

    f = jtbridge.wrap(fn, backend=by)
    x = jnp.sin(jnp.arange(24.0)).reshape(2, 3, 4)
    dx = jnp.cos(jnp.arange(24.0)).reshape(2, 3, 4)
    moved = jax.jit(lambda x, dx: jax.jvp(f, (x,), (dx,))[1])(x, dx)
    expected = jax.jvp(lambda x: jax.lax.cumlogsumexp(x, 1), (x,), (dx,))[1].at[0].set(0)
    np.testing.assert_allclose(moved.reshape(x.shape), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("by", ["auto", "dlpack", "callback"])
def test_nan_of_one_element_does_not_affect_others(by: str, jitted: bool, x64: None):
    """The derivative of `igamma` is NaN at -1, and finite at the other elements."""
    f = jtbridge.wrap(lambda x: torch.igamma(torch.ones(3, dtype=x.dtype), x), backend=by)
    run = (
        (lambda x, dx: jax.jvp(f, (x,), (dx,))[1]) if not jitted else jax.jit(lambda x, dx: jax.jvp(f, (x,), (dx,))[1])
    )
    moved = run(jnp.array([0.5, -1.0, 2.0]), jnp.array([1.0, 1.0, -3.0]))
    np.testing.assert_allclose(moved, [np.exp(-0.5), np.nan, -3 * np.exp(-2.0)], rtol=1e-9)


@pytest.mark.parametrize("name", ["product", "quotient", "divisor", "power", "cross", "view"])
@pytest.mark.parametrize("batched", [False, True])
def test_number_without_tangent_times_infinity_gives_no_nan(name: str, batched: bool, backend: str):
    """Torch's lazy zeros, the tangents of numbers and constants, times infinity are zero."""
    factors = torch.tensor([float("inf"), 2.0, float("nan")])
    fn = {
        "product": lambda x: torch.where(x > 0, x, x * 2) - 1 / x,
        "quotient": lambda x: x / torch.tensor([0.0, 2.0, 3.0]),
        "divisor": lambda x: 2 / x + torch.atan2(x, torch.tensor(1.0)),
        "power": lambda x: x ** torch.full((3,), 2.0),
        "cross": lambda x: torch.linalg.cross(x, factors),
        "view": lambda x: x * torch.tensor(2.0).expand(3) * factors,
    }[name]
    x, dx = torch.tensor([float("inf"), float("nan"), 0.0]), torch.tensor([1.0, 2.0, 3.0])
    wrapped = jtbridge.wrap(fn, backend=backend)

    def run(x, dx):
        return jax.jvp(wrapped, (x,), (dx,))[1]

    expected = torch.func.jvp(fn, (x,), (dx,))[1]
    if batched:
        assert_matches(jax.jit(jax.vmap(run))(*jaxes([torch.stack([x, x]), torch.stack([dx, dx])]))[1], expected)
    else:
        assert_matches(jax.jit(run)(*jaxes([x, dx])), expected)


POWERS = {
    "complex exponent": lambda x, z: x ** (1 + 2j),
    "complex exponents": lambda x, z: x**z,
    "complex bases": lambda x, z: z**x,
    "complex base": lambda x, z: (1 + 1j) ** x,
    "base without axes": lambda x, z: x[0] ** z,
    "in place": lambda x, z: z.clone().pow_(x),
}


@pytest.mark.parametrize("name", POWERS)
@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack"])
def test_complex_powers_of_and_by_real_numbers(name: str, backend: str, x64: None):
    """Torch's forward mode loses the imaginary part (torch 2.13)."""
    f = jtbridge.wrap(POWERS[name], backend=backend)
    x, z = jnp.array([1.5, 0.7]), jnp.array([1 + 2j, 0.5 - 1j])
    step = jnp.array([1.0, -0.5])
    value = jax.jit(lambda x: f(x, z))
    by_difference = (value(x + 1e-6 * step) - value(x - 1e-6 * step)) / 2e-6
    for jitted in (jax.jit, lambda g: g):
        tangent = jitted(lambda x: jax.jvp(lambda x: f(x, z), (x,), (step,))[1])(x)
        np.testing.assert_allclose(tangent, by_difference, rtol=1e-7)


@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack"])
def test_atan2_tangent_at_the_origin_is_zero(backend: str):
    f, zero = jtbridge.wrap(torch.atan2, backend=backend), jnp.zeros(2)
    assert_trees_close(jax.jit(lambda x: jax.jvp(f, (x, x), (x + 1, x + 1))[1])(zero), zero)
    assert_trees_close(jax.jit(jax.grad(lambda x: f(x, x).sum()))(zero), zero)


class SquaresWithOwnTangent(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * 2 * ctx.saved_tensors[0]


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack"])
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_jvp_inside_a_function_with_a_custom_jvp(jitted: bool, backend: str, x64: None):
    """Torch's forward mode over forward mode treats the tangent of such a function as 0 (torch 2.13)."""

    def fn(x):
        return torch.func.jvp(lambda u: SquaresWithOwnTangent.apply(u) * u, (x,), (x.cos(),))[1]

    f, x = jtbridge.wrap(fn, backend=backend), jnp.array([0.3, 0.7])
    want = jax.jacfwd(lambda x: 3 * x**2 * jnp.cos(x))(x)
    got = (jax.jit if jitted else lambda g: g)(jax.jacfwd(f))(x)
    np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-12)


def test_hook_of_a_module_on_another_device(monkeypatch: pytest.MonkeyPatch):
    """On a machine with a GPU, functions are examined there. A module on the CPU can only be translated."""
    module = torch.nn.Linear(3, 2)
    module.register_full_backward_hook(lambda module, inputs, outputs: (10 * inputs[0],))
    monkeypatch.setattr("jtbridge.calls.traced._call.called_device", lambda backend: "meta")
    f = jtbridge.wrap(lambda x: module(x).sum(), backend="xla")
    x = jnp.ones(3)
    wanted = 10 * module.weight.detach().numpy().sum(0)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(f))(x), wanted, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(x), wanted, rtol=1e-5)
