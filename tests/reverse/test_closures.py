"""Closures of JAX functions that torch calls: tracers, state that changes, and arrays that are freed."""

import contextlib
import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import jtbridge
from jtbridge.errors import ArgumentError, ConstantsWarning, JaxCallError, ModelError

B = jnp.ones(2) * 3


def loss(a, backend="auto"):
    f = jtbridge.to_torch_function(lambda x: x * a)
    return jtbridge.wrap(lambda t: f(t) * 2, backend=backend)(B).sum()


TRACES = {
    "jit": jax.jit,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "jit of jacfwd": lambda f: jax.jit(jax.jacfwd(f)),
    "grad": jax.grad,
    "vmap": lambda f: lambda a: jax.vmap(f)(jnp.stack([a])),
    "scan": lambda f: lambda a: jax.lax.scan(lambda carry, a: (carry, f(a)), 0.0, jnp.stack([a])),
}


@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack"])
@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_a_tracer_is_refused_inside_a_wrapped_function(trace, backend):
    with pytest.raises(JaxCallError, match=r"closes over an array that JAX traces.*Pass the array"):
        trace(lambda a: loss(a, backend))(jnp.asarray(5.0))
    assert loss(jnp.asarray(5.0), backend) == 60.0


@pytest.mark.parametrize("trace", [jax.jit, jax.grad, lambda f: lambda a: jax.vmap(f)(jnp.stack([a]))])
def test_a_tracer_is_refused_in_a_call_of_torch(trace):
    def f(a):
        jtbridge.to_torch_function(lambda x: x * a)(torch.ones(2, requires_grad=True))
        return a

    with pytest.raises(JaxCallError, match="closes over an array that JAX traces"):
        trace(f)(jnp.asarray(5.0))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.vmap(f, axis_name="rows"),
        lambda f: jax.vmap(jax.grad(lambda x: f(x).sum()), axis_name="rows"),
    ],
    ids=["vmap", "grad"],
)
def test_vmap_axis_name_across_torch_code_is_refused(transform):
    centered = jtbridge.to_torch_function(lambda x: x - jax.lax.pmean(x, "rows"))
    rows = jnp.arange(6.0).reshape(3, 2)
    with pytest.raises(JaxCallError, match=r"uses the name of an axis .*rows.*in JAX, before or after"):
        transform(jtbridge.wrap(lambda x: centered(x)))(rows)
    with pytest.raises(JaxCallError, match="uses the name of an axis"):
        centered(torch.ones(2))
    inside = jtbridge.to_torch_function(jax.vmap(lambda x: x - jax.lax.pmean(x, "rows"), axis_name="rows"))
    assert jax.vmap(jtbridge.wrap(lambda x: inside(x)), axis_name="rows")(rows).tolist() == [[-0.5, 0.5]] * 3


def test_tracer_is_refused_in_nested_conversions():
    outer = jtbridge.to_torch_function(
        lambda x: jtbridge.wrap(lambda t: jtbridge.to_torch_function(lambda y: y * x.sum())(t))(B)
    )
    with pytest.raises(JaxCallError, match="closes over an array that JAX traces"):
        outer(torch.ones(2))


def _vjp(f):
    y, pull = torch.func.vjp(f, torch.ones(1))
    return y, lambda: pull(torch.ones(1))[0]


def _grad_of_vmap(f):
    y, pull = torch.func.vjp(torch.func.vmap(f), torch.ones(1, 1))
    return y, lambda: pull(torch.ones(1, 1))[0]


def _dual(f):
    x = torch.ones(1, requires_grad=True)
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones(1))))
    return y.primal, lambda: torch.autograd.grad(y.primal, x)[0]


def _dual_of_tangent(f):
    x = torch.ones(1, requires_grad=True)
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones(1))))
    return y.tangent, lambda: torch.autograd.grad(y.tangent, x)[0]


class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _in_a_dispatch_mode(f):
    x = torch.ones(1, requires_grad=True)
    with Plain():
        y = f(x)
    return y, lambda: torch.autograd.grad(y, x)[0]


def _second(f):
    def first(x):
        return torch.func.grad(lambda x: f(x).sum())(x)

    y, pull = torch.func.vjp(first, torch.ones(1))
    return y, lambda: pull(torch.ones(1))[0]


FORWARDS = [(_vjp, 2.0), (_grad_of_vmap, 2.0), (_dual, 2.0), (_dual_of_tangent, 4.0), (_in_a_dispatch_mode, 2.0)]


@pytest.mark.parametrize(("run", "value"), [*FORWARDS, (_second, 4.0)])
def test_a_gradient_belongs_to_its_values_after_state_has_changed(run, value):
    factor = [2.0]
    f = jtbridge.to_torch_function(lambda x: x * x * factor[0])
    y, gradient = run(f)
    factor[0] = 5.0
    jax.clear_caches()
    assert y.item() == value
    assert gradient().item() == 4.0
    assert f(torch.ones(1)).item() == 5.0


def test_a_gradient_belongs_to_its_values_under_another_setting():
    factor = [2.0]
    f = jtbridge.to_torch_function(lambda x: x * x * factor[0])
    with jax.default_matmul_precision("highest"):
        y, pull = torch.func.vjp(f, torch.ones(1))
    factor[0] = 5.0
    assert (y.item(), pull(torch.ones(1))[0].item()) == (2.0, 4.0)


def test_cleared_caches_free_arrays_closed_over_by_gradients():
    held = [None]
    f = jtbridge.to_torch_function(lambda x: x * held[0])
    x = torch.ones(1000, requires_grad=True)
    references = []
    for i in range(8):
        held[0] = jnp.full(1000, float(i))
        references.append(weakref.ref(held[0]))
        f(x).sum().backward()
        torch.func.grad(lambda x: f(x).sum())(x.detach())
        torch.func.jvp(f, (x.detach(),), (x.detach(),))
        jax.clear_caches()
        gc.collect()
    alive = sum(reference() is not None for reference in references)
    assert alive <= 4  # the latest, which calls under torch.func find again


@pytest.mark.parametrize("convert", [torch.func.functionalize, torch.func.vmap, torch.func.grad])
def test_to_jax_refuses_a_tensor_of_a_transformation(convert):
    def f(x):
        return x * float(jtbridge.to_jax(x).sum())

    with pytest.raises(ArgumentError, match="has no values, because torch is tracing or transforming"):
        convert(f)(torch.ones(3))


def test_to_jax_refuses_a_tensor_of_a_trace():
    def f(x, w):
        return jtbridge.to_torch_function(lambda x: x * jtbridge.to_jax(w))(x)

    x, w = jnp.ones(3), jnp.full(3, 5.0)
    assert jtbridge.wrap(f)(x, w).tolist() == [5.0, 5.0, 5.0]
    with pytest.raises(ArgumentError, match="has no values, because torch is tracing or transforming"):
        jax.jit(jtbridge.wrap(f))(x, w)


def test_to_jax_converts_a_closed_over_tensor_in_a_trace():
    w = torch.full((3,), 5.0)
    f = jtbridge.wrap(lambda x: jtbridge.to_torch_function(lambda x: x * jtbridge.to_jax(w))(x))
    for call in (f, jax.jit(f)):
        assert call(jnp.ones(3)).tolist() == [5.0, 5.0, 5.0]
        assert jax.vmap(call)(jnp.ones((1, 3))).tolist() == [[5.0, 5.0, 5.0]]


def _own(read):
    """Return a module with a JAX function that reads its weight when JAX traces it."""

    class Reading(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(3))
            self.made = read(self)

        def forward(self, x):
            return self.made(x).sum()

    return Reading()


def _made(read):
    """Return a module that makes a JAX function in each call, which reads its weight when JAX traces it."""

    class Reading(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            return read(self)(x).sum()

    return Reading()


to_torch = jtbridge.to_torch_function
READS = {
    "jit": lambda self: to_torch(jax.jit(lambda x: x * jnp.asarray(self.w.detach()))),
    "checkpoint": lambda self: to_torch(jax.checkpoint(lambda x: x * jnp.asarray(self.w.detach()))),
    "vmap": lambda self: to_torch(jax.vmap(lambda x: x * jnp.asarray(self.w.detach())[0])),
    "wrap": lambda self: to_torch(jtbridge.wrap(lambda x: x * self.w)),
    "jit of wrap": lambda self: to_torch(jax.jit(jtbridge.wrap(lambda x: x * self.w))),
}
X = jnp.ones(3)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.ConstantsWarning")
@pytest.mark.parametrize("first_in_torch", [False, True])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_a_weight_of_the_torch_module_is_refused(read, first_in_torch):
    module = _own(read)
    if first_in_torch:
        assert module(torch.ones(3)).item() == 3.0
    net = jtbridge.module(module)
    params, state = net.init()
    params = {"w": 5 * params["w"]}
    for call in (net, jax.jit(net), jax.grad(lambda params, state, x: net(params, state, x)[0])):
        with pytest.raises(ModelError, match=r"uses the torch module's own `w` in `.*`, and not the one in `params`"):
            call(params, state, X)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.ConstantsWarning")
@pytest.mark.parametrize("first_in_torch", [False, True])
def test_a_closure_is_copied_with_the_module_and_traced_again(first_in_torch):
    module = _own(lambda self: to_torch(lambda x: x * jnp.asarray(self.w.detach())))
    if first_in_torch:
        assert module(torch.ones(3)).item() == 3.0
    net = jtbridge.module(module)
    params, state = net.init()
    for factor in (5, 7):
        assert net({"w": factor * params["w"]}, state, X)[0] == 3.0 * factor


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
@pytest.mark.parametrize(
    "read",
    [
        lambda self: to_torch(lambda x: x * jtbridge.to_jax(self.w)),
        lambda self: to_torch(jtbridge.wrap(lambda x: x * self.w)),
        lambda self: to_torch(lambda x: x * self.w.sum().item()),
    ],
)
def test_a_parameter_that_a_closure_reads_without_detach_is_refused(read):
    net = jtbridge.module(_made(read))
    params, state = net.init()
    for call in (net, jax.grad(lambda params, state, x: net(params, state, x)[0])):
        with pytest.raises(ModelError, match=r"closes over `w`, which gets no gradient|requires a gradient, and gets"):
            call(params, state, X)
    with pytest.raises(jtbridge.errors.JtbridgeError, match=r"[Pp]ass (the tensor|it) to .* as an argument|Pass it as"):
        jax.jit(net)(params, state, X)


def test_detached_weights_are_values_eagerly_and_refused_in_a_trace():
    net = jtbridge.module(_made(READS["jit"]))
    params, state = net.init()
    params = {"w": 5 * params["w"]}
    assert net(params, state, X)[0] == 15.0
    assert jax.grad(lambda params: net(params, state, X)[0])(params)["w"].tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(JaxCallError, match=r"closes over a tensor that has no values here.*as an argument"):
        jax.jit(net)(params, state, X)


def test_closed_over_arguments_are_refused_in_a_gradient():
    f = jtbridge.wrap(lambda x, w: to_torch(lambda x: x * jtbridge.to_jax(w))(x).sum())
    assert f(X, 5 * X) == 15.0
    assert jax.grad(f)(X, 5 * X).tolist() == [5.0, 5.0, 5.0]
    derived = jtbridge.wrap(lambda x, w: to_torch(lambda x: x * jtbridge.to_jax(w * 2))(x).sum())
    for g in (f, derived):
        with pytest.raises(JaxCallError, match=r"closes over a tensor of shape \(3,\) that requires a gradient"):
            jax.grad(g, 1)(X, 5 * X)
    detached = jtbridge.wrap(lambda x, w: to_torch(lambda x: x * jtbridge.to_jax((w * 2).detach()))(x).sum())
    assert jax.grad(detached, 1)(X, 5 * X).tolist() == [0.0, 0.0, 0.0]


def test_weights_without_a_gradient_give_one_warning():
    linear, before = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    f = to_torch(jtbridge.wrap(lambda x: linear(x)))
    with pytest.warns(ConstantsWarning, match=r"2 torch tensors that require a gradient \(shape \(3, 3\), "):
        f(before(torch.ones(2, 3))).sum().backward()
    assert before.weight.grad is not None
    f(before(torch.ones(2, 3))).sum().backward()


@pytest.mark.parametrize("kind", ["frozen", "no_grad", "detach", "wrapped", "only reachable"])
def test_weights_that_need_no_gradient_give_no_warning(kind):
    linear = torch.nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    if kind == "frozen":
        linear.requires_grad_(False)
        to_torch(jtbridge.wrap(lambda x: linear(x)))(x)
    elif kind == "no_grad":
        with torch.no_grad():
            to_torch(jtbridge.wrap(lambda x: linear(x)))(x)
    elif kind == "detach":
        to_torch(lambda x: x @ jnp.asarray(linear.weight.detach()))(x)
    elif kind == "wrapped":  # a constant of the wrapped function anyway
        wrapped = jtbridge.wrap(lambda x: to_torch(jtbridge.wrap(lambda x: linear(x)))(x).sum())
        wrapped(jnp.ones((2, 3)))
        jax.jit(jax.grad(wrapped))(jnp.ones((2, 3)))
    else:
        linear.factor = 2
        to_torch(jtbridge.wrap(lambda x: x * linear.factor))(x)


def test_a_compiled_function_calls_a_wrapped_function_first():
    f = to_torch(jtbridge.wrap(lambda x: x * 2))
    assert torch.compile(f, backend="aot_eager")(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_transforms_within_a_wrapped_function_in_a_transform():
    cubes = to_torch(jtbridge.wrap(lambda x: torch.func.vmap(lambda x: x**3)(x)))
    assert torch.func.vjp(cubes, torch.ones(3))[0].tolist() == [1.0, 1.0, 1.0]
    slopes = to_torch(jtbridge.wrap(lambda x: torch.func.grad(lambda x: (x**3).sum())(x)))
    assert torch.func.grad(lambda x: slopes(x).sum())(torch.ones(3)).tolist() == [6.0, 6.0, 6.0]


def test_a_jitted_function_of_a_module_as_its_attribute():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(3))
            self.factor = 2.0
            self.scale = jax.jit(lambda x: x * self.factor)

        def forward(self, x):
            return to_torch(self.scale)(x * self.w).sum()

    net = jtbridge.module(Scaled())
    params, state = net.init()
    assert net(params, state, X)[0] == 6.0
    assert jax.jit(net)(params, state, X)[0] == 6.0


def test_two_settings_of_jax_in_turn_compile_once_each():
    f = to_torch(lambda x: jnp.sin(x) * x)
    gradient = torch.func.grad(lambda x: f(x).sum())

    def alternate():
        for precision in ("highest", "default") * 2:
            with jax.default_matmul_precision(precision):
                gradient(torch.ones(16))

    alternate()
    with counted_compiles() as compiles:
        alternate()
    assert compiles == []


@contextlib.contextmanager
def counted_compiles():
    found = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


READ_WITHOUT_A_GRADIENT = {
    "the result is detached": lambda w: float(w.mean().detach()),
    "a cast is detached": lambda w: jnp.asarray(w.float().detach().numpy()),
    "a part is detached": lambda w: jnp.asarray(w[:].detach().numpy()),
    "by force": lambda w: jnp.asarray(w.numpy(force=True)),
    "a shape": lambda w: w.reshape(3, 1).shape[1],
    "a question": lambda w: 1.0 * w.is_contiguous(),
    "zeros like it": lambda w: 1 + jnp.asarray(torch.zeros_like(w, requires_grad=False).numpy()),
}


@pytest.mark.parametrize("read", READ_WITHOUT_A_GRADIENT.values(), ids=READ_WITHOUT_A_GRADIENT)
def test_reads_without_a_gradient(read):
    module = _made(lambda self: lambda x: to_torch(lambda y: y * read(self.w))(x * self.w))
    assert module(torch.ones(3)).item() == module(torch.ones(3)).item()
    net = jtbridge.module(module)
    assert float(net(*net.init(), X)[0]) == module(torch.ones(3)).item()


def test_weights_closed_over_by_a_nested_function_are_refused():
    def nested(self):
        inner = to_torch(jtbridge.wrap(lambda x: x * self.w))
        return to_torch(jtbridge.wrap(lambda x: inner(x)))

    net = jtbridge.module(_made(nested))
    params, state = net.init()
    with pytest.raises(ModelError, match="closes over `w`, which gets no gradient"):
        jax.grad(lambda params: net(params, state, X)[0])(params)


def test_a_warning_is_given_once_for_all_static_values():
    linear = torch.nn.Linear(3, 3)
    f = to_torch(lambda x, factor: x * jtbridge.to_jax(linear.weight)[0] * factor)
    with pytest.warns(ConstantsWarning, match="requires a gradient"):
        f(torch.ones(3, requires_grad=True), 0.0)
    for factor in (1.0, 2.0):
        f(torch.ones(3, requires_grad=True), factor)
