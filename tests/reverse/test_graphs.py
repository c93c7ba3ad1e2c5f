"""JAX functions in torch's graphs: opcheck, torch.compile, torch.export and make_fx."""

from __future__ import annotations

import gc
import io

import jax
import jax.numpy as jnp
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import jtbridge
from jtbridge.core.jax_calls import HANDLES
from jtbridge.errors import ArgumentError, JaxCallError
from jtbridge.reverse._bound import BoundFunction

f = jtbridge.to_torch_function(lambda x, b: {"y": x**2 * jnp.sin(x) + b["k"], "z": (x, x + 1), "none": None})


def user(x: torch.Tensor) -> torch.Tensor:
    result = f(x * 2, {"k": x})
    return result["y"].cos() + result["z"][1]


def reference(x: torch.Tensor) -> torch.Tensor:
    return ((2 * x) ** 2 * torch.sin(2 * x) + x).cos() + 2 * x + 1


def _x() -> torch.Tensor:
    return torch.rand(3, generator=torch.Generator().manual_seed(0)).requires_grad_()


def _handle(name: str) -> str:
    functions = [function for function in HANDLES.values() if type(function) is BoundFunction]
    (handle,) = [function.handle for function in functions if function.name == name]
    return handle


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # of torch's own code
def test_opcheck():
    @jtbridge.to_torch_function
    def checked(x, n, z):
        return x * jnp.sum(jnp.abs(z)) + n.astype(x.dtype), n + 1, z * 2, n > 0

    tensors = [_x(), torch.tensor([1, 2, 3], dtype=torch.int32), torch.rand(2, dtype=torch.complex64)]
    checked(*tensors)
    results = torch.library.opcheck(torch.ops.jtbridge.jax_call.default, (tensors, _handle("checked")))
    assert len(results) == 4
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend: str):
    torch.compiler.reset()
    compiled = torch.compile(user, backend=backend, fullgraph=True)
    x = _x()
    torch.testing.assert_close(compiled(x), reference(x))
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(reference(x).sum(), x))
    y = torch.rand(5)
    torch.testing.assert_close(compiled(y), reference(y))


def test_compile_distinguishes_functions():
    torch.compiler.reset()
    compiled = torch.compile(lambda f, x: f(x), backend="eager", fullgraph=True)
    functions = [jtbridge.to_torch_function(lambda x, n=n: x * n) for n in (2.0, 3.0, 5.0)]
    assert [compiled(f, torch.ones(())).item() for f in (*functions, *functions)] == [2, 3, 5, 2, 3, 5]


def test_compile_keeps_functions_alive(monkeypatch):
    monkeypatch.setattr("jtbridge.reverse._bound._MAX_SIGNATURES", 2)
    torch.compiler.reset()
    g = jtbridge.to_torch_function(lambda x, n: x * n)
    compiled = torch.compile(lambda x: g(x, 3.0), backend="aot_eager", fullgraph=True)
    x = torch.rand(3)
    torch.testing.assert_close(compiled(x), 3 * x)
    for number in range(4):  # more signatures than one function keeps
        g(x, float(number)).sum()
    gc.collect()
    torch.testing.assert_close(compiled(x), 3 * x)


def test_compile_names_results_that_it_cannot_trace():
    torch.compiler.reset()

    g = jtbridge.to_torch_function(lambda x: jax.tree_util.Partial(jnp.sin, x))
    with pytest.raises(Exception, match=r"returned a Partial inside torch\.compile") as raised:
        torch.compile(lambda x: g(x).args[0], backend="eager", fullgraph=True)(torch.rand(3))
    assert "ArgumentError" in repr(raised.value) or isinstance(raised.value, ArgumentError)


@pytest.mark.parametrize("x64_first", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_graphs_and_x64_that_changes(backend: str, x64_first: bool):
    torch.compiler.reset()
    g = jtbridge.to_torch_function(lambda x: x**2)
    compiled = torch.compile(lambda x: g(x) + 1, backend=backend, fullgraph=True)
    x = torch.tensor([1 / 3], dtype=torch.float64, requires_grad=True)
    with jax.enable_x64(x64_first):
        result = compiled(x)
        torch.testing.assert_close(result, g(x) + 1, rtol=0, atol=0)
    torch.testing.assert_close(*torch.autograd.grad(result.sum(), x), 2 * x, rtol=1e-6, atol=0)  # x64 may be off
    with jax.enable_x64(not x64_first):
        if backend == "eager":  # its graph is Python code
            torch.testing.assert_close(compiled(x), g(x) + 1, rtol=0, atol=0)
            return
        with pytest.raises(JaxCallError, match=r"torch\.compiler\.reset"):
            compiled(x)
        torch.compiler.reset()
        torch.testing.assert_close(compiled(x), g(x) + 1, rtol=0, atol=0)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool):
    class Model(torch.nn.Module):
        def forward(self, x):
            return user(x)

    x = _x().detach()
    program = torch.export.export(Model(), (x,), strict=strict)
    assert "jtbridge.jax_call" in str(program.graph)
    torch.testing.assert_close(program.module()(x), reference(x))
    with pytest.raises(Exception, match=r"shape|size"):  # sizes are constants of the graph
        program.module()(torch.rand(4))


def test_make_fx_of_a_gradient():
    x = _x().detach()
    graph = make_fx(torch.func.grad(lambda x: user(x).sum()))(x)
    torch.testing.assert_close(graph(x), torch.func.grad(lambda x: reference(x).sum())(x))


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_without_values(kind: str):
    with torch.device("meta") if kind == "meta" else FakeTensorMode():
        x = torch.ones(3, requires_grad=True)
    results = user(x)
    (gradient,) = torch.autograd.grad(results.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    for tensor in (results, gradient, second):
        assert tensor.shape == x.shape
        assert tensor.device == x.device
        assert type(tensor) is type(x)


def test_a_function_without_arguments_on_the_meta_device():
    zeros = jtbridge.to_torch_function(lambda: {"x": jnp.zeros((2, 3)), "n": jnp.arange(4)})
    with torch.device("meta"):
        found = zeros()
    assert (found["x"].device.type, found["x"].shape, found["x"].dtype) == ("meta", (2, 3), torch.float32)
    assert (found["n"].device.type, found["n"].shape, found["n"].dtype) == ("meta", (4,), torch.int64)
    assert zeros()["n"].tolist() == [0, 1, 2, 3]


def test_graph_that_outlives_its_function_raises():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.function = jtbridge.to_torch_function(lambda x: x + 1)

        def forward(self, x):
            return self.function(x)

    saved = io.BytesIO()
    torch.export.save(torch.export.export(Model(), (torch.rand(3),)), saved)
    gc.collect()
    saved.seek(0)
    with pytest.raises(JaxCallError, match="does not exist in this process"):
        torch.export.load(saved).module()(torch.rand(3))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # TorchDynamo looks at it
def test_compile_beside_an_argument_that_no_graph_can_hold():
    """TorchDynamo then runs the call between two graphs."""
    torch.compiler.reset()

    @jax.tree_util.register_static
    class Factor:
        number = 3

    g = jtbridge.to_torch_function(lambda x, factor: x * factor.number)
    factor = Factor()
    compiled = torch.compile(lambda x: g(x + 1, factor) + 1, backend="eager")
    x = _x()
    torch.testing.assert_close(compiled(x), 3 * (x + 1) + 1)
    torch.testing.assert_close(*torch.autograd.grad(compiled(x).sum(), x), torch.full((3,), 3.0))


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_numbers_become_constants_of_the_graph(backend, dynamic):
    @jtbridge.to_torch_function
    def scaled(x, scale, *, count, flag):
        assert type(scale) is float
        assert type(count) is int
        assert type(flag) is bool
        return x * scale + count if flag else x

    def fn(x, scale, count):
        return scaled(2 * x, scale / 2, count=count + x.shape[0], flag=scale > 1).cos()

    torch.compiler.reset()
    compiled = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)
    for size, scale, count in ((2, 1.5, 1), (2, 2.5, 1), (3, 2.5, 2), (4, 0.5, 3), (2, 1.5, 1)):
        x = torch.linspace(0, 1, size, requires_grad=True)
        torch.testing.assert_close(compiled(x, scale, count), fn(x, scale, count))
        (got,) = torch.autograd.grad(compiled(x, scale, count).sum(), x)
        (want,) = torch.autograd.grad(fn(x, scale, count).sum(), x)
        torch.testing.assert_close(got, want)


def _tangent_of_a_level(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual(sine(dual) * x).tangent


sine = jtbridge.to_torch_function(jnp.sin)
FORWARD = {
    "jvp": lambda x: torch.func.jvp(lambda y: sine(y) * y, (x,), (torch.ones_like(x),))[1],
    "jacfwd": torch.func.jacfwd(lambda y: sine(y) * y),
    "vmap of jvp": torch.func.vmap(lambda x: torch.func.jvp(lambda y: sine(y) * y, (x,), (torch.ones_like(x),))[1]),
    "function alone": lambda x: torch.func.jvp(sine, (x,), (x,))[1],
    "hessian": torch.func.hessian(lambda y: (sine(y) * y).sum()),
    "dual level": _tangent_of_a_level,
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_inside_a_compiled_function(name: str, backend: str):
    """The graph enters forward mode without a call of `torch.autograd.forward_ad`."""
    torch.compiler.reset()
    x = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(torch.compile(FORWARD[name], backend=backend)(x), FORWARD[name](x))
    assert torch.func.jvp(torch.sin, (x,), (x,))[1].equal(torch.cos(x) * x)  # no level is left


def test_derivatives_use_the_trace_of_the_values():
    factor = [2.0]
    f = jtbridge.to_torch_function(lambda x: x * factor[0])
    x = torch.tensor(3.0)
    f(x)
    factor[0] = 7.0
    for value, gradient in (
        torch.func.grad_and_value(f)(x)[::-1],
        torch.func.jvp(f, (x,), (torch.ones(()),)),
        [each[0] for each in torch.func.vmap(torch.func.grad_and_value(f))(x[None])][::-1],
    ):
        assert (float(value), float(gradient)) == (6.0, 2.0)
    y = f(x.requires_grad_())
    factor[0] = 9.0
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    assert (y.item(), gradient.item()) == (6.0, 2.0)


W = jnp.arange(6.0).reshape(3, 2)


def _after_a_break(fn):
    def broken(x):
        torch._dynamo.graph_break()
        return fn(x)

    return broken


TRANSFORMS = {
    "vmap": lambda fn: torch.func.vmap(_after_a_break(fn)),
    "grad": lambda fn: torch.func.grad(lambda x: _after_a_break(fn)(x).sum()),
    "jacrev": lambda fn: torch.func.jacrev(_after_a_break(fn)),
    "hessian": lambda fn: torch.func.hessian(lambda x: _after_a_break(fn)(x).sum()),
    "jvp": lambda fn: lambda x: torch.func.jvp(_after_a_break(fn), (x,), (x,))[1],
    "vmap of a module": lambda fn: torch.func.vmap(_Module(fn)),  # torch itself breaks the graph here
}


class _Module(torch.nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of TorchDynamo, about the break
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_first_call_after_a_graph_break(transform: str):
    """TorchDynamo then compiles the Python code that runs, but must not compile that of JAX."""
    torch.compiler.reset()
    f = jtbridge.to_torch_function(lambda x: jnp.tanh(x @ W))
    x = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    found = torch.compile(TRANSFORMS[transform](f), backend="aot_eager")(x)
    expected = TRANSFORMS[transform](lambda x: torch.tanh(x @ torch.tensor(W.tolist())))(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # TorchDynamo reads it
def test_compiled_autograd():
    """The backward of a call outside of the compiled function becomes part of its graph."""
    backward = torch.compile(lambda y: y.sum().backward(), backend="aot_eager")
    with torch._dynamo.config.patch(compiled_autograd=True):
        for fn, derivative in (
            (jnp.square, lambda x: 2 * x),
            (lambda x: x**3, lambda x: 3 * x**2),
            (jnp.sin, torch.cos),
        ):
            x = _x()
            backward(jtbridge.to_torch_function(fn)(x))
            torch.testing.assert_close(x.grad, derivative(x.detach()))
    torch.compiler.reset()
