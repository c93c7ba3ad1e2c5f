"""Derivatives of JAX functions in torch, to the third order, are those of the same functions in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from jax.experimental import io_callback
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import jtbridge

from .functions import COMPLEX, ONCE, REAL, Case

Function = Callable[[torch.Tensor], torch.Tensor]


def _summed(f: Function) -> Function:
    return lambda x: (f(x) ** 2).sum()


def _by_backward(f: Function, x: torch.Tensor, order: int) -> list[torch.Tensor]:
    """Return the derivatives of the sum up to an order, by `torch.autograd.grad`."""
    leaf = x.clone().requires_grad_()
    value, found = _summed(f)(leaf), []
    for _ in range(order):
        (value,) = torch.autograd.grad(value, leaf, create_graph=True)
        found.append(value)
        value = (value * torch.cos(leaf)).sum()
    return found


def _pulled(f: Function, x: torch.Tensor) -> Any:
    out, pull, *_ = vjp(f, x)
    assert isinstance(out, torch.Tensor)
    return out, pull(out * (1 + 2j) if out.is_complex() else out)


def _dual(f: Function, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        leaf = x.clone().requires_grad_()
        primal, tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(leaf, torch.sin(x))))
        assert tangent is not None
        (mixed,) = torch.autograd.grad((tangent**2 * leaf.sum()).sum(), leaf)
        return primal, tangent, forward_ad.unpack_dual(mixed).primal


def _rows(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x.cos(), x * 2])


TRANSFORMS: dict[str, Callable[[Function, torch.Tensor], Any]] = {
    "call": lambda f, x: f(x),
    "backward 1": lambda f, x: _by_backward(f, x, 1),
    "backward 3": lambda f, x: _by_backward(f, x, 3),
    "grad": lambda f, x: grad(_summed(f))(x),
    "grad of grad": lambda f, x: grad(lambda x: (grad(_summed(f))(x) ** 2).sum())(x),
    "vjp": _pulled,
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),)),
    "jvp of jvp": lambda f, x: jvp(lambda x: jvp(f, (x,), (x.cos(),))[1], (x,), (x,)),
    "linearize": lambda f, x: linearize(f, x)[1](x.cos()),
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(_summed(f))(x),
    "jacrev of jacrev": lambda f, x: jacrev(jacrev(_summed(f)))(x),
    "jacrev of jacfwd": lambda f, x: jacrev(jacfwd(f))(x),
    "third": lambda f, x: jacfwd(jacrev(jacrev(_summed(f))))(x),
    "vmap": lambda f, x: vmap(f)(_rows(x)),
    "vmap by another axis": lambda f, x: vmap(f, in_dims=-1, out_dims=-1)(_rows(x).movedim(0, -1)),
    "vmap of grad": lambda f, x: vmap(grad(_summed(f)))(_rows(x)),
    "vmap of hessian": lambda f, x: vmap(hessian(_summed(f)))(_rows(x)),
    "grad of vmap": lambda f, x: grad(lambda x: (vmap(f)(_rows(x)) ** 2).sum())(x),
    "vmap of vmap": lambda f, x: vmap(vmap(f))(_rows(_rows(x))),
    "dual numbers": _dual,
}


SOME = ("backward 3", "hessian", "jvp", "vmap of grad")  # of every function; the first one gets all
PAIRS = [(case, name) for case in REAL for name in TRANSFORMS if case is REAL[0] or name in SOME]


@pytest.mark.filterwarnings(
    "ignore:Attempted to insert a get_attr Node:UserWarning"
)  # torch's linearize, of any function
@pytest.mark.parametrize(("case", "transform"), PAIRS, ids=lambda value: getattr(value, "name", value))
def test_real_functions(case: Case, transform: str):
    got = TRANSFORMS[transform](jtbridge.to_torch_function(case.of_jax), case.x)
    expected = TRANSFORMS[transform](case.of_torch, case.x)
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("transform", ["call", "backward 3", "grad of grad", "jacrev", "vmap of grad"])
def test_functions_with_custom_gradients(transform: str):
    got = TRANSFORMS[transform](jtbridge.to_torch_function(ONCE.of_jax), ONCE.x)
    torch.testing.assert_close(got, TRANSFORMS[transform](ONCE.of_torch, ONCE.x), rtol=1e-4, atol=1e-4)


def _real(f: Function) -> Function:
    return lambda z: (f(z).abs() ** 2).sum()


COMPLEX_TRANSFORMS: dict[str, Callable[[Function, torch.Tensor], Any]] = {
    "call": lambda f, z: f(z),
    "vjp": _pulled,
    "grad": lambda f, z: grad(_real(f))(z),
    "jvp": lambda f, z: jvp(f, (z,), (z * 1j + 1,)),
    "backward": lambda f, z: _by_backward(lambda z: torch.view_as_real(f(z) + 0j), z, 1),
    "second": lambda f, z: grad(lambda z: (grad(_real(f))(z).abs() ** 2).sum())(z),
    "forward over reverse": lambda f, z: jvp(grad(_real(f)), (z,), (z * 1j + 1,)),
    "conjugated view": lambda f, z: f(z.conj()),
    "vmap of grad": lambda f, z: vmap(grad(_real(f)))(_rows(z)),
}


@pytest.mark.parametrize("transform", COMPLEX_TRANSFORMS)
@pytest.mark.parametrize("case", COMPLEX, ids=lambda case: case.name)
def test_complex_functions(case: Case, transform: str):
    got = COMPLEX_TRANSFORMS[transform](jtbridge.to_torch_function(case.of_jax), case.x)
    expected = COMPLEX_TRANSFORMS[transform](case.of_torch, case.x)
    torch.testing.assert_close(got, expected, rtol=5e-4, atol=5e-4)


def test_second_derivative_of_a_product():
    x = torch.tensor(0.7, requires_grad=True)
    (first,) = torch.autograd.grad(jtbridge.to_torch_function(lambda x: x**2 * jnp.sin(x))(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert second.item() == pytest.approx(3.1143, abs=1e-3)


def test_gradcheck_in_double_precision(x64):
    f = jtbridge.to_torch_function(lambda x, y: {"a": jnp.sin(x) * y, "b": (x.sum(), jnp.arange(3))})
    x, y = (
        torch.rand(3, dtype=torch.float64, requires_grad=True),
        torch.rand(1, dtype=torch.float64, requires_grad=True),
    )

    def flat(x, y):
        result = f(x, y)
        return result["a"], result["b"][0]

    assert torch.autograd.gradcheck(flat, (x, y), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(flat, (x, y), check_fwd_over_rev=True)


def test_only_results_that_need_a_gradient_require_one():
    f = jtbridge.to_torch_function(lambda x, n, y: (x * n.astype(x.dtype) * y, n + 1, n > 1))
    x, y, n = torch.rand(3, requires_grad=True), torch.rand(3), torch.tensor([1, 2, 3])
    out, count, flag = f(x, n, y)
    assert (out.requires_grad, count.requires_grad, flag.requires_grad) == (True, False, False)
    assert (count.dtype, flag.dtype) == (torch.int64, torch.bool)
    out.sum().backward()
    torch.testing.assert_close(x.grad, n * y)
    assert y.grad is None


def test_unused_results_and_arguments():
    f = jtbridge.to_torch_function(lambda x, y: (jnp.sin(x), jnp.cos(x) + 0 * y, jnp.zeros(2)))
    x, y = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    got = torch.autograd.grad(f(x, y)[0].sum(), [x, y])
    torch.testing.assert_close(got, (x.cos(), torch.zeros(3)))
    got = torch.autograd.grad(f(x, y)[2].sum(), [x, y])
    torch.testing.assert_close(got, (torch.zeros(3), torch.zeros(3)))


@jax.custom_vjp
def with_another_gradient(x):
    return x


with_another_gradient.defvjp(lambda x: (x, None), lambda _, ct: (ct + 1.0,))


def doubled_in_a_loop(x):
    return jax.lax.while_loop(lambda y: y.sum() < 5, lambda y: 2 * y, x)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("unused", [jnp.sqrt, with_another_gradient, doubled_in_a_loop], ids=["inf", "rule", "loop"])
def test_result_without_a_cotangent_is_not_differentiated(unused: Callable, create_graph: bool):
    f = jtbridge.to_torch_function(lambda x: (unused(x), 2 * x, x * x))
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    for out, expected in ((1, [2.0, 2.0]), (1, [2.0, 2.0]), (2, [0.0, 2.0]), (1, [2.0, 2.0])):
        (got,) = torch.autograd.grad(f(x)[out].sum(), x, create_graph=create_graph)
        assert got.tolist() == expected
    results = f(x)  # whose forward expects the cotangents of the last backward
    (got,) = torch.autograd.grad(results[1].sum() + results[2].sum(), x, create_graph=create_graph)
    assert got.tolist() == [2.0, 4.0]
    if unused is with_another_gradient:
        assert torch.autograd.grad(f(x)[0].sum(), x)[0].tolist() == [2.0, 2.0]


def test_the_state_of_a_module_has_no_cotangent():
    def apply(params, state, x):
        return x * params, 0.9 * state + 0.1 * jnp.linalg.norm(x * params)

    module = jtbridge.to_torch_module(apply, jnp.zeros(3), jnp.zeros(()))
    for _ in range(2):
        module.zero_grad()
        module(torch.ones(3)).sum().backward()
        assert module.value.grad.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("change", ["caches", "context"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradient_uses_the_trace_of_the_values(change: str, create_graph: bool):
    factor = [2.0]
    f = jtbridge.to_torch_function(lambda x: x * x * factor[0])
    x = torch.ones(2, requires_grad=True)
    with jax.default_matmul_precision("highest" if change == "context" else "default"):
        y = f(x)
    factor[0] = 5.0
    if change == "caches":
        jax.clear_caches()
    (got,) = torch.autograd.grad(y.sum(), x, create_graph=create_graph)
    assert got.tolist() == [4.0, 4.0]
    if create_graph:
        assert torch.autograd.grad(got.sum(), x)[0].tolist() == [4.0, 4.0]


def test_gradient_uses_the_forward_run_and_repeats_no_effects():
    """This holds whichever results are used. JAX calls the host once for a value and its gradient."""
    calls = []

    def count():
        calls.append(1)
        return np.float32(len(calls))

    def f(x):
        number = io_callback(count, jax.ShapeDtypeStruct((), jnp.float32))
        return x * number, 2 * x

    in_torch = jtbridge.to_torch_function(f)
    x = torch.tensor(3.0, requires_grad=True)
    for step, used in enumerate(((0,), (1,), (0, 1), (0,), (1,)), 1):
        results = in_torch(x)
        (got,) = torch.autograd.grad(sum(results[i] for i in used), x)
        assert (results[0].item(), len(calls)) == (3.0 * step, step)
        assert got.item() == sum((step, 2)[i] for i in used)


def test_a_function_without_a_gradient_runs():
    calls = []

    def host(x):
        calls.append(1)
        return np.sin(x)

    def of_host(x):
        return 2 * jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    f = jtbridge.to_torch_function(of_host)
    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        torch.testing.assert_close(f(x), 2 * torch.sin(torch.ones(3)))
    assert len(calls) == 2
    with pytest.raises(ValueError, match="Pure callbacks do not support JVP"):
        f(x).sum().backward()


def test_hooks_accumulation_and_retained_graphs():
    f = jtbridge.to_torch_function(lambda x: (jnp.exp(x) * x).sum())
    x = torch.rand(3, requires_grad=True)
    seen = []
    x.register_hook(lambda g: seen.append(g.clone()))
    value = f(x)
    value.backward(retain_graph=True)
    value.backward()
    torch.testing.assert_close(x.grad, 2 * seen[0])
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


def test_checkpointing_and_hooks_of_saved_tensors():
    f = jtbridge.to_torch_function(lambda x: jnp.tanh(x) ** 2)
    x = torch.rand(3, requires_grad=True)
    expected = torch.autograd.grad(f(x).sum(), x)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
        got = torch.autograd.grad(f(x).sum(), x)
    assert packed
    torch.testing.assert_close(got, expected)
    again = torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), x), expected)


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.float8_e4m3b11fnuz, "key"], ids=str)
def test_residuals_of_dtypes_that_torch_does_not_have(dtype):
    def saved(x):
        return jax.random.key(3) if dtype == "key" else jnp.sign(x).astype(dtype)

    @jax.custom_vjp
    def doubled(x):
        return x * 2

    def backward(residual, ct):
        return (ct * (5 if dtype == "key" else residual.astype(ct.dtype)),)

    doubled.defvjp(lambda x: (x * 2, saved(x)), backward)
    x = torch.tensor([-2.0, 3.0], requires_grad=True)
    jtbridge.to_torch_function(doubled)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == ([5.0, 5.0] if dtype == "key" else [-1.0, 1.0])


def test_no_grad_inference_mode_and_detached():
    f = jtbridge.to_torch_function(jnp.sin)
    x = torch.rand(3, requires_grad=True)
    with torch.no_grad():
        assert not f(x).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(f(torch.ones(2)), torch.ones(2).sin())
    with torch.inference_mode():
        made = torch.rand(3)
    torch.testing.assert_close(f(made), made.sin())


def test_functional_call_of_a_module():
    module = jtbridge.to_torch_module(lambda p, x: jnp.tanh(x @ p["w"]), {"w": jnp.ones((3, 2))})
    x = torch.rand(5, 3)
    values = {"w": torch.rand(3, 2)}
    got = grad(lambda values: functional_call(module, values, (x,)).sum())(values)["w"]
    expected = grad(lambda w: torch.tanh(x @ w).sum())(values["w"])
    torch.testing.assert_close(got, expected)


@jax.custom_vjp
def clipped(x):
    return x**3


clipped.defvjp(lambda x: (x**3, x), lambda x, cotangent: (jnp.clip(3 * x**2, -5, 5) * cotangent,))


def test_second_derivatives_of_a_function_with_a_custom_gradient():
    at = np.array([1.0, 2.0], "float32")
    f = jtbridge.to_torch_function(clipped)

    def of_torch(x):
        return f(x).sum()

    def of_jax(x):
        return clipped(x).sum()

    x = torch.from_numpy(at)
    np.testing.assert_allclose(torch.func.hessian(of_torch)(x), jax.hessian(of_jax)(at))
    np.testing.assert_allclose(torch.func.vmap(torch.func.hessian(of_torch))(x[None])[0], jax.hessian(of_jax)(at))
    got = torch.func.jvp(torch.func.grad(of_torch), (x,), (x,))
    want = jax.jvp(jax.grad(of_jax), (at,), (at,))
    np.testing.assert_allclose(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1])
    got = torch.func.grad(lambda x: torch.func.hessian(of_torch)(x).sum())(x)
    np.testing.assert_allclose(got, jax.grad(lambda x: jax.hessian(of_jax)(x).sum())(at))
    with pytest.raises(TypeError, match="custom_vjp"):
        torch.func.jvp(f, (x,), (x,))
