"""JAX functions inside wrapped torch functions: part of the translated program, and run directly in eager calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import ConstantsWarning, JaxCallError

inner = jtbridge.to_torch_function(lambda x: x**2 * jnp.sin(x))


@jtbridge.wrap
def outer(x, y):
    return (inner(x * 2) * y).cos().sum()


def reference(x, y):
    x = x * 2
    return jnp.sum(jnp.cos(x**2 * jnp.sin(x) * y))


X, Y = jnp.asarray([0.2, 0.5, 0.8]), jnp.asarray([1.0, 1.5, 0.5])


def _rows(f):
    return lambda x, y: jax.vmap(f)(jnp.stack([x, y]), jnp.stack([y, x]))


TRANSFORMS = {
    "call": lambda f: f,
    "grad": jax.grad,
    "second": lambda f: jax.grad(lambda x, y: jax.grad(f)(x, y).sum()),
    "hessian": jax.hessian,
    "jvp": lambda f: lambda x, y: jax.jvp(f, (x, y), (y, x)),
    "third": lambda f: jax.jacfwd(jax.jacrev(jax.jacrev(f))),
    "vmap": _rows,
    "vmap of grad": lambda f: _rows(jax.grad(f)),
}


WAYS = [
    (name, jit) for name in TRANSFORMS for jit in (False, True) if jit or name != "third"
]  # JAX takes seconds for it


@pytest.mark.parametrize(("transform", "jit"), WAYS, ids=lambda value: {True: "jit", False: "eager"}.get(value, value))
def test_transformations(transform: str, jit: bool):
    change = TRANSFORMS[transform]
    got = (jax.jit(change(outer)) if jit else change(outer))(X, Y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4), got, change(reference)(X, Y))


def test_the_program_contains_the_function_and_no_callback():
    text = jax.jit(jax.grad(outer)).lower(X, Y).as_text()
    assert "sine" in text
    assert "custom_call" not in text
    assert "callback" not in text


def test_a_function_that_is_made_inside():
    f = jtbridge.wrap(lambda x: jtbridge.to_torch_function(jnp.sin)(x).sum())
    np.testing.assert_allclose(jax.jit(jax.grad(f))(X), jnp.cos(X), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(f)(X), jnp.cos(X), rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_wide_types_and_constants(jit: bool):
    count = jtbridge.to_torch_function(lambda x, i: (x * 2, i + 1))
    f = jtbridge.wrap(lambda x: (*count(x.double(), x.long()), inner(torch.ones(2)) * x[0]))
    got = (jax.jit(f) if jit else f)(X)
    assert [a.dtype for a in got] == [jnp.float32, jnp.int32, jnp.float32]
    np.testing.assert_allclose(got[0], 2 * X)
    np.testing.assert_allclose(got[2], np.sin(1.0) * X[0] * np.ones(2), rtol=1e-6)


def test_wide_types_with_x64(x64):
    f = jtbridge.wrap(lambda x: inner(x.double()))
    x = jnp.asarray([0.5], jnp.float64)
    np.testing.assert_allclose(jax.jit(f)(x), x**2 * jnp.sin(x), rtol=1e-14)


def test_a_torch_module_of_a_jax_model():
    module = jtbridge.to_torch_module(lambda p, x: jnp.tanh(x @ p), jnp.ones((3, 2)))
    apply = jtbridge.module(module)
    params, state = apply.init()

    def loss(params):
        return apply(params, state, X[None])[0].sum()

    got = jax.jit(jax.grad(loss))(params)
    expected = jax.grad(lambda w: jnp.tanh(X[None] @ w).sum())(jnp.ones((3, 2)))
    np.testing.assert_allclose(got["value"], expected, rtol=1e-5)


def test_a_wrapped_function_in_a_torch_function():
    """Nesting: torch in JAX in torch."""
    f = jtbridge.to_torch_function(jtbridge.wrap(lambda x: x**2 * torch.sin(x)))
    x = torch.tensor(0.7, requires_grad=True)
    (first,) = torch.autograd.grad(f(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert second.item() == pytest.approx(3.1143, abs=1e-3)


@pytest.mark.parametrize("called", ["dlpack", "callback"])
def test_a_call_inside_a_callback_is_refused(called: str):
    f = jtbridge.wrap(lambda x: inner(x) * 2, backend=called)
    np.testing.assert_allclose(f(X), 2 * X**2 * jnp.sin(X), rtol=1e-6)  # eagerly, no callback runs
    for function in (f, jax.grad(lambda x: f(x).sum())):
        with pytest.raises(jax.errors.JaxRuntimeError, match="cannot run inside a callback") as raised:
            jax.block_until_ready(jax.jit(function)(X))
        assert JaxCallError.__name__ in str(raised.value)
    np.testing.assert_allclose(jax.jit(outer)(X, Y), reference(X, Y), rtol=1e-5)
    torch.testing.assert_close(inner(torch.ones(1)), torch.ones(1).sin())


in_torch_code = jtbridge.wrap(lambda x: torch.sin(x) * x)
back_in_torch = jtbridge.to_torch_function(lambda x: 2 * in_torch_code(x))


@jtbridge.wrap
def there_and_back_again(x):
    return back_in_torch(x) * x


@pytest.mark.parametrize("program", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        lambda f: jax.grad(lambda x: f(x).sum()),
        lambda f: jax.hessian(lambda x: f(x).sum()),
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
        lambda f: lambda x: jax.vmap(jax.grad(lambda x: f(x).sum()))(jnp.stack([x, 2 * x])),
    ],
)
def test_a_wrapped_function_in_a_jax_function_in_a_wrapped_function(transform, program):
    at = jnp.array([0.3, -0.7])
    got = program(transform(there_and_back_again))(at)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        got,
        transform(lambda x: 2 * jnp.sin(x) * x**2)(at),
    )


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("depth", [2, 3])
def test_nested_functions(transform: str, depth: int):
    """In a compiled program no wrapped function was called before, so each level is captured inside the next one."""
    f = outer
    for _ in range(depth):
        f = jtbridge.wrap(jtbridge.to_torch_function(lambda x, y, f=f: f(x, y) * 2))

    def expected(x, y):
        return reference(x, y) * 2**depth

    got = jax.jit(TRANSFORMS[transform](f))(X, Y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4), got, TRANSFORMS[transform](expected)(X, Y))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_weights_in_nested_functions(transform: str):
    """A trace that begins inside another trace is not recorded by that trace, and uses none of its tensors."""
    linear = torch.nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        linear.weight.copy_(3 * torch.eye(3))
    weighted = jtbridge.wrap(lambda x: linear(x) * x)
    in_torch = jtbridge.to_torch_function(lambda x, y: weighted(x) * jnp.cos(y))
    f = jtbridge.wrap(lambda x, y: in_torch(x, y).sum())

    def expected(x, y):
        return (3 * x * x * jnp.cos(y)).sum()

    with pytest.warns(ConstantsWarning, match="closes over a torch tensor that requires a gradient"):
        in_torch(torch.ones(3, requires_grad=True), torch.ones(3)).sum().backward()
    run, reference = TRANSFORMS[transform](f), TRANSFORMS[transform](expected)(X, Y)
    for program in (run, jax.jit(run), TRANSFORMS[transform](jax.jit(f)), jax.jit(run)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), program(X, Y), reference)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian, torch.func.jacfwd])
def test_nested_functions_from_torch(transform):
    twice = jtbridge.wrap(lambda x: inner(x) * 2)
    f = jtbridge.to_torch_function(lambda x: jtbridge.wrap(jtbridge.to_torch_function(lambda x: twice(x) + x))(x).sum())
    x = torch.tensor([0.2, 0.5])
    expected = transform(lambda x: (2 * x**2 * torch.sin(x) + x).sum())(x)
    torch.testing.assert_close(transform(f)(x), expected)


def test_wrapped_function_runs_as_torch_after_a_nested_call():
    f = jtbridge.wrap(lambda x: in_torch_code(back_in_torch(x)))
    np.testing.assert_allclose(f(jnp.array([0.5])), jax.jit(f)(jnp.array([0.5])), rtol=1e-5)


def test_wrapped_function_inside_a_jax_function_traced_by_torch_func():
    inner = jtbridge.wrap(lambda x: torch.sin(x) * jtbridge.to_torch_function(jnp.cos)(x))
    f = jtbridge.to_torch_function(lambda x: inner(x))  # JAX has not traced it yet
    x = torch.rand(2, 3)
    got = torch.func.vmap(torch.func.hessian(lambda x: f(x).sum()))(x)
    torch.testing.assert_close(got, torch.diag_embed(-2 * torch.sin(2 * x)))


@pytest.mark.parametrize("transform", ["call", "grad", "jvp"])
def test_jax_function_reads_its_state_at_each_call(transform: str):
    scale = [1.0]
    inside = jtbridge.to_torch_function(lambda x: x * scale[0])
    f = jtbridge.wrap(lambda x: inside(x).sum())
    changed = {
        "call": lambda x: f(x) / X.sum(),
        "grad": lambda x: jax.grad(f)(x)[0],
        "jvp": lambda x: jax.jvp(f, (x,), (jnp.ones(3) / 3,))[1],
    }[transform]

    def program(x):
        scale[0] = 10.0
        try:
            return changed(x)
        finally:
            scale[0] = 1.0

    np.testing.assert_allclose(jax.jit(program)(X), 10.0, rtol=1e-6)


def test_a_jax_function_is_traced_once():
    calls = []
    inside = jtbridge.to_torch_function(lambda x: (calls.append(1), x * len(calls))[1])
    np.testing.assert_array_equal(jax.jit(jtbridge.wrap(lambda x: inside(x)))(X), X)
    assert calls == [1]
