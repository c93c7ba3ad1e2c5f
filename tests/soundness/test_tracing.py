"""Functions that behave differently under a trace than in torch, unless the tracer is careful.

One table of cases. Each runs under ``jax.jit`` with every backend, value and gradient, and is compared with torch
itself on the same numbers. A backend may refuse what it cannot translate, by name; it may not give other numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import jtbridge
from jtbridge.errors import TranslationError
from tests.compare import as_numpy, assert_close

BACKENDS = ["auto", "xla", "dlpack", "callback"]
X = np.array([1.0, 2.0, 3.0, 4.0], np.float32)

# ruff: noqa: BLE001 (the functions catch everything on purpose)
pytestmark = [
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning"),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of one vector, for each of `points`."""

    fn: Callable[..., Any]
    points: tuple[np.ndarray, ...] = (X, -X)
    untraceable: bool = False  # it needs values, so backend "xla" refuses it
    untraceable_gradient: bool = False  # its gradient does
    gradient: bool = True


CASES: dict[str, Case] = {}


def case(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        CASES[fn.__name__] = Case(fn, **options)
        return fn

    return register


# Constants

SIGNED_ZEROS = torch.tensor([0.0, -0.0, 0.0, -0.0])
NANS = torch.tensor([math.nan, -math.nan], dtype=torch.float32)


@case(gradient=False)
def divides_by_signed_zeros(v):
    return v / SIGNED_ZEROS


@case()
def signs_of_zeros(v):
    return v * torch.copysign(torch.ones(4), SIGNED_ZEROS)


@case(gradient=False)
def negative_zeros_made_inside(v):
    return v / torch.tensor([-0.0, -0.0, -0.0, -0.0]), v / torch.full((4,), -0.0), v / torch.zeros(4).neg()


@case(gradient=False)
def complex_signed_zeros(v):
    return torch.complex(v, torch.zeros(4)) * torch.tensor([complex(0.0, -0.0), complex(0.0, 0.0)] * 2)


@case(gradient=False)
def scalar_negative_zero(v):
    zero = v - v
    return (
        1 / (zero * -1.0),
        1 / torch.where(v > 0, -0.0, 0.0),
        1 / torch.nn.functional.pad(zero, (1, 1), value=-0.0),
        1 / zero.masked_fill(v > 0, -0.0),
        1 / torch.full_like(v, -0.0),
        1 / v.new_tensor([-0.0, 0.0]),
    )


# Code that asks whether gradients are recorded

WEIGHT = nn.Parameter(torch.tensor(3.0))


@case()
def grad_mode_branch(v):
    return WEIGHT * v * (2 if torch.is_grad_enabled() else 3)


@case()
def requires_grad_branch(v):
    y = WEIGHT * 2
    return v * y if y.requires_grad else v + y


@case()
def grad_mode_chooses_among_results(v):
    a, b = WEIGHT * v, WEIGHT + v
    return (a, b) if torch.is_grad_enabled() else (b, a)


@case()
def grad_mode_chooses_a_constant(v):
    table = torch.tensor([2.0, 3.0])
    return WEIGHT * v * table[0 if torch.is_grad_enabled() else 1]


@case()
def grad_mode_chooses_a_literal_tensor(v):
    return WEIGHT * v * torch.tensor(2.0 if torch.is_grad_enabled() else 3.0)


OTHER_WEIGHT = nn.Parameter(torch.tensor(5.0))


@case()
def grad_mode_chooses_a_weight(v):
    return v * (WEIGHT if torch.is_grad_enabled() else OTHER_WEIGHT)


@case()
def grad_mode_inside_no_grad(v):
    with torch.no_grad():
        factor = 2 if torch.is_grad_enabled() else 3
    return WEIGHT * v * factor


# Exceptions that only tracing raises, caught by the function


@case(untraceable=True)
def swallowed_float(v):
    try:
        s = float(v.detach().sum())
    except Exception:
        s = 0.0
    return v * s


@case(untraceable=True)
def swallowed_item(v):
    with contextlib.suppress(RuntimeError):
        return v * v.detach().sum().item()
    return v


@case(untraceable=True)
def swallowed_by_bare_except(v):
    try:
        n = int(v.detach().abs().sum())
    except:  # noqa: E722
        n = 0
    return v * n


@case()
def swallowed_bool(v):
    try:
        positive = bool(v.detach().sum() > 0)
    except Exception:
        positive = False
    return v * 2 if positive else v * 3


@case(untraceable=True)
def swallowed_numpy(v):
    try:
        s = float(v.detach().numpy().sum())
    except Exception:
        s = 0.0
    return v * s


@case(untraceable=True)
def swallowed_asarray(v):
    try:
        s = float(np.asarray(v.detach()).max())
    except Exception:
        s = 0.0
    return v * s


@case(untraceable=True)
def swallowed_tolist(v):
    try:
        s = sum(v.detach().tolist())
    except Exception:
        s = 0.0
    return v * s


@case(untraceable=True)
def swallowed_index(v):
    try:
        i = range(10)[v.detach().argmax()]
    except Exception:
        i = 7
    return v * i


@case(untraceable=True)
def swallowed_and_another_raised(v):
    def total():
        try:
            return v.detach().sum().item()
        except Exception as error:
            raise ValueError("no total") from error

    try:
        return v * total()
    except ValueError:
        return v


@case(untraceable=True)
def swallowed_numpy_array_of_numbers(v):
    try:
        s = float(np.array([v[0].detach(), v[1].detach()]).sum())
    except Exception:
        s = 0.0
    return v * s


@case(untraceable_gradient=True)
def swallowed_in_the_gradient_alone(v):
    if v.requires_grad:
        try:
            s = float(v.detach().sum())
        except Exception:
            s = 0.0
        return v * s
    return v * v.detach().sum()


@case(untraceable=True)
def swallowed_torch_error(v):
    try:
        return v @ torch.ones(3)
    except RuntimeError:
        return v * 2


# Predicates of data


@case(gradient=False)
def equal_after_promotion(v):
    yes, no = torch.ones(()), torch.zeros(())
    integer = v.detach().round().long()
    return [
        torch.where(torch.tensor(torch.equal(v.detach().round(), integer)), yes, no),
        yes if torch.equal(integer.float() + 0.5, integer) else no,
    ]


@case(points=(X, X + 0.5))
def equal_of_other_dtypes(v):
    return v * 2 if torch.equal(v.detach(), v.detach().long()) else v * 3


@case(points=(X, X * math.nan), gradient=False)
def equal_of_nan(v):
    return v * 0 + 2 if torch.equal(v, v.clone()) else v * 0 + 3


@case(points=(X, X * 0, X * -0.0))
def equal_of_signed_zeros(v):
    return v * 2 if torch.equal(v.detach(), torch.zeros(4)) else v * 3


@case(points=(X, X * math.nan), gradient=False)
def allclose_with_nan(v):
    first = 2 if torch.allclose(v, v.clone()) else 3
    second = 5 if torch.allclose(v, v.clone(), equal_nan=True) else 7
    return v * 0 + first, v * 0 + second


@case(points=(X, X + 1e-3))
def allclose_with_tolerances(v):
    return v * 2 if torch.allclose(v.detach(), torch.from_numpy(X), rtol=0, atol=1e-2) else v * 3


@case()
def all_of_data(v):
    return v * 2 if (v.detach() > 0).all() else v * 3


@case()
def compares_sums(v):
    return v * 2 if v.detach().sum() > 0 else v * 3


# Hooks


def _hooked(tensor, hook):
    if tensor.requires_grad:
        tensor.register_hook(hook)
    return tensor


@case()
def tensor_hook(v):
    return _hooked(v * 2, lambda g: g * 10) ** 2


@case()
def node_hook(v):
    y = v * 2
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda grads: (grads[0] * 10,))
    return y**2


class _WithHook(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        torch.manual_seed(0)
        nn.init.normal_(self.inner.weight)
        self.inner.register_full_backward_hook(lambda module, gi, go: (gi[0] * 10,))

    def forward(self, v):
        return torch.tanh(self.inner(v[None]))[0]


WITH_HOOK = _WithHook()


@case()
def module_hook(v):
    return WITH_HOOK(v)


@case()
def requires_grad_of_the_argument(v):
    return v.detach() * v if v.requires_grad else v * v


class _TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, a, b):
        return a * 100 if b is None else a * 2 + b * 3


@case()
def unmaterialized_inside(v):
    return _TwoResults.apply(v)[0]


# Random generators that belong to the function


@case(untraceable=True)
def generator_made_inside(v):
    generator = torch.Generator().manual_seed(3)
    return v * torch.rand(4, generator=generator) + torch.randn(4, generator=generator)


@case(untraceable=True)
def generator_seeded_later(v):
    generator = torch.Generator()
    generator.manual_seed(5)
    noise = torch.empty(4).normal_(generator=generator)
    generator.manual_seed(5)
    again = torch.empty(4).normal_(generator=generator)
    order = torch.randperm(4, generator=generator)
    return v[order] * noise + again


def gradient_of(fn: Callable[..., Any], point: np.ndarray) -> torch.Tensor:
    """Return the gradient of the sum of the squares of the first result."""
    x = torch.from_numpy(point.copy()).requires_grad_()
    return torch.autograd.grad((jax.tree.leaves(fn(x))[0] ** 2).sum(), x)[0]


def assert_same(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            assert type(a) is type(b)
            continue
        assert_close(np.asarray(a), as_numpy(b))
        numbers = ~np.isnan(as_numpy(b))
        assert np.array_equal(np.signbit(np.asarray(a).real)[numbers], np.signbit(as_numpy(b).real)[numbers])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_value(name: str, backend: str):
    case = CASES[name]
    for jitted in (True, False) if backend == "xla" else (True,):
        f = jtbridge.wrap(case.fn, backend=backend)
        f = jax.jit(f) if jitted else f
        for point in case.points:
            expected = case.fn(torch.from_numpy(point.copy()))
            if case.untraceable and backend == "xla":
                with pytest.raises(TranslationError):
                    f(jnp.asarray(point))
                return
            assert_same(f(jnp.asarray(point)), expected)


def gradients_of(f: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    def loss(x: jax.Array) -> jax.Array:
        return (jax.tree.leaves(f(x))[0] ** 2).sum()

    return {
        "grad": jax.grad(loss),
        "vjp": lambda x: jax.vjp(loss, x)[1](jnp.ones(()))[0],
        "jacfwd": jax.jacfwd(loss),
        "linearize": lambda x: jax.vmap(jax.linearize(loss, x)[1])(jnp.eye(x.size)),
        "jvp": lambda x: jnp.stack([jax.jvp(loss, (x,), (e,))[1] for e in jnp.eye(x.size)]),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name, each in CASES.items() if each.gradient])
def test_gradient(name: str, backend: str):
    case = CASES[name]
    f = jtbridge.wrap(case.fn, backend=backend)
    for way, gradient in gradients_of(f).items():
        for point in case.points:
            if (case.untraceable or case.untraceable_gradient) and backend == "xla":
                with pytest.raises(TranslationError):
                    jax.jit(gradient)(jnp.asarray(point))
                continue
            assert_close(jax.jit(gradient)(jnp.asarray(point)), as_numpy(gradient_of(case.fn, point)), None, way)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dicts_keep_insertion_order(backend: str):
    f = jtbridge.wrap(lambda d, **rest: torch.cat([*d.values(), *rest.values()]), backend=backend)
    a, b = jnp.zeros(2), jnp.ones(2)
    assert f({"b": b, "a": a}, z=b, y=a).tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    assert jax.jit(lambda a, b: f({"b": b, "a": a}, z=b, y=a))(a, b).tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    assert f({"a": a, "b": b}, y=a, z=b).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    result = jtbridge.wrap(lambda v: {"b": v, "a": {"d": v + 1, "c": v + 2}}, backend=backend)(a)
    assert list(result) == ["b", "a"]
    assert list(result["a"]) == ["d", "c"]
    assert result["a"]["c"].tolist() == [2, 2]


@dataclasses.dataclass(frozen=True)
class Setting:
    value: Any


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("around", [Setting, lambda x: frozenset({x}), lambda x: slice(x, None), lambda x: x])
def test_static_arguments_differ_by_type_and_value(around: Callable[[Any], Any], backend: str):
    def fn(v, static):
        found = next(iter(static)) if isinstance(static, frozenset) else getattr(static, "value", static)
        found = found.start if isinstance(found, slice) else found
        number = {bool: 1, int: 2, float: 3}[type(found)]
        return v * number * math.copysign(1, found)

    f = jtbridge.wrap(fn, backend=backend)
    values = [1, 1.0, True, 0.0, -0.0]
    got = [f(jnp.ones(()), around(value)).item() for value in values]
    assert got == [2, 3, 1, 3, -3]
