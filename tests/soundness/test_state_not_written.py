"""State that a function builds for itself, or only reads, is not refused."""

from __future__ import annotations

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import MutationError

X = jnp.asarray([1.0, 2.0, 4.0])


class Lazy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mask, self.known, self.ready = None, {}, False

    @functools.cached_property
    def scale(self):
        return torch.full((3,), 2.0)

    def forward(self, x):
        self.ready = True
        if self.mask is None:
            self.mask = torch.triu(torch.ones(3, 3))
        if x.shape not in self.known:
            self.known[x.shape] = torch.arange(3.0)
        return self.mask @ x * self.scale + self.known[x.shape]


@pytest.mark.parametrize("backend", ["xla", "dlpack"])
def test_lazily_built_constants_are_kept(backend):
    module = Lazy()
    want = Lazy()(torch.tensor(np.asarray(X)))
    f = jtbridge.wrap(module, backend=backend)
    for _ in range(2):
        np.testing.assert_allclose(jax.jit(f)(X), want)
        np.testing.assert_allclose(jax.jit(jax.grad(lambda x: f(x).sum()))(X), [2, 4, 6])
    for tensor in (module.mask, module.scale, *module.known.values()):
        assert type(tensor) is torch.Tensor
    torch.testing.assert_close(module(torch.tensor(np.asarray(X))), want)


class BuildsTensors(torch.nn.Module):
    """A module that makes each kind of tensor in its first call, with values that do not depend on the arguments."""

    def __init__(self):
        super().__init__()
        self.weight, self.kept = None, []
        self.register_buffer("table", None, persistent=False)

    def forward(self, x):
        if self.weight is None:
            self.weight = torch.nn.Parameter(torch.full(x.shape, 2.0))
            self.register_parameter("frozen", torch.nn.Parameter(torch.ones(3), requires_grad=False))
            self.table = torch.nn.Buffer(torch.arange(3.0), persistent=False)
            self.kept.append(torch.ones(3, requires_grad=True))
        return x * self.weight * self.frozen * self.kept[0] + self.table


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack"])
@pytest.mark.parametrize("run", [jax.jit, lambda f: jax.jit(jax.grad(lambda x: f(x).sum())), jax.vmap])
def test_lazily_built_tensors_keep_their_type(backend, run):
    module, twin = BuildsTensors(), BuildsTensors()
    x = torch.ones(3)
    twin(x)
    run(jtbridge.wrap(module, backend=backend))(jnp.ones((2, 3)) if run is jax.vmap else X)
    for tensor, wanted in ((module.weight, twin.weight), (module.table, twin.table), (module.kept[0], twin.kept[0])):
        assert type(tensor) is type(wanted)
        assert tensor.requires_grad is wanted.requires_grad
        torch.testing.assert_close(tensor, wanted)
    flags, wanted = ({name: p.requires_grad for name, p in each.named_parameters()} for each in (module, twin))
    assert flags == wanted == {"weight": True, "frozen": False}
    assert [*module.state_dict()] == [*twin.state_dict()]
    for each in (module, twin):
        each(x).sum().backward()
    torch.testing.assert_close(module.weight.grad, twin.weight.grad)
    torch.testing.assert_close(module.kept[0].grad, twin.kept[0].grad)


def test_local_objects_are_not_state():
    def f(x):
        seen, n = [], 0
        for row in x:
            seen.append(row)
            n += 1
        it = iter(seen)
        return next(it) * n + random.Random(3).random()

    assert float(jax.jit(jtbridge.wrap(f))(X)) == pytest.approx(3 + random.Random(3).random())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
def test_weight_norm_and_spectral_norm_hooks(norm):
    module = norm(torch.nn.Linear(3, 3)).eval()
    x = torch.tensor(np.asarray(X))
    want = module(x).detach().numpy()
    state = jtbridge.to_jax({**dict(module.named_parameters()), **dict(module.named_buffers())})
    f = jtbridge.wrap(lambda state, x: torch.func.functional_call(module, state, (x,)))
    np.testing.assert_allclose(jax.jit(jtbridge.wrap(module))(X), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(f)(state, X), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(module(x).detach().numpy(), want, rtol=1e-5, atol=1e-6)


def test_reading_state_and_printing_is_not_refused(capsys):
    settings = {"scale": 3.0}

    def f(x):
        print("traced")  # noqa: T201
        return x * settings["scale"]

    np.testing.assert_array_equal(jax.jit(jtbridge.wrap(f))(X), 3 * X)
    assert "traced" in capsys.readouterr().out


AROUND = """
def around(fn):
    def inner(x):
        calls.append(len(calls))
        return fn(x)
    inner.__module__ = fn.__module__
    return inner
"""


@pytest.mark.parametrize(("module", "is_refused"), [("torch.decorators", False), ("user.decorators", True)])
def test_globals_of_a_library_decorator_are_not_state(module, is_refused):
    scope = {"__name__": module, "calls": []}
    exec(AROUND, scope)
    f = jax.jit(jtbridge.wrap(scope["around"](lambda x: 2 * x)))
    if is_refused:
        with pytest.raises(MutationError, match="calls"):
            f(X)
    else:
        np.testing.assert_array_equal(f(X), 2 * X)


class WithDescriptor(type):
    """A metaclass whose `__module__` is a descriptor for its classes, like that of functions compiled by Cython."""

    __module__ = property(lambda cls: "compiled")


class Compiled(metaclass=WithDescriptor):
    __module__ = property(lambda self: "compiled")

    def __init__(self):
        self.rate = torch.tensor(2.0)

    def __call__(self, x):
        return x * self.rate


COMPILED = Compiled()


@pytest.mark.parametrize("backend", ["xla", "dlpack"])
def test_class_without_a_module_name(backend):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.compiled = Compiled()

        def forward(self, x):
            return self.compiled(x) + COMPILED(x)

    assert not isinstance(WithDescriptor.__module__, str)
    assert not isinstance(Compiled.__dict__["__module__"], str)
    np.testing.assert_allclose(jax.jit(jtbridge.wrap(lambda x: COMPILED(x), backend=backend))(X), 2 * X)
    net = jtbridge.module(Layer(), backend=backend)
    np.testing.assert_allclose(jax.jit(net)(*net.init(), X)[0], 4 * X)
    assert jtbridge.purity(lambda x: COMPILED(x), X).is_pure
