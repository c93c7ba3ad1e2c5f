"""Errors: jtbridge's errors are clear, those of the function are unchanged, and the next call works."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import ArgumentError, DeviceError, DifferentiationError, DTypeError

double = jtbridge.to_torch_function(lambda x: x * 2)


@pytest.fixture(autouse=True)
def works_afterwards():
    yield
    assert double(torch.ones(2)).tolist() == [2.0, 2.0]


def _deleted() -> jax.Array:
    array = jnp.ones(3)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("argument", "error", "text"),
    [
        (
            lambda: torch.eye(2).to_sparse(),
            ArgumentError,
            r"Argument `argument 0` of `<lambda>` has layout torch.sparse_coo",
        ),
        (lambda: torch.nested.nested_tensor([torch.ones(1)]), ArgumentError, "is a nested tensor"),
        (lambda: {"a": [set()]}, ArgumentError, r"`argument 0\['a'\]\[0\]` of `<lambda>` is a set, which is neither"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), DTypeError, "torch.qint8"),
        (lambda: np.array(["a"]), DTypeError, r"`argument 0` of `<lambda>` has JAX dtype `<U1`"),
        (lambda: [np.ones(2, ">f4")], DTypeError, r"`argument 0\[0\]` of `<lambda>` has JAX dtype `>f4`"),
        (_deleted, ArgumentError, "`argument 0` of `<lambda>` is an array that was deleted, or donated"),
        (lambda: torch.fx.Proxy(torch.fx.Graph().placeholder("x")), ArgumentError, "is a Proxy, which stands"),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:.*:UserWarning", "ignore:.*:DeprecationWarning"
)  # torch's, of these kinds of tensors
def test_arguments_that_jax_cannot_have(argument, error, text):
    with pytest.raises(error, match=text):
        double(argument())


@dataclasses.dataclass(frozen=True, eq=False)
class Config:
    weight: Any


class Slots:
    __slots__ = ("weights",)

    def __init__(self, tensor):
        self.weights = [(1, tensor)]


class WithBuffer(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.register_buffer("x", value if isinstance(value, torch.Tensor) else None)


class Pair(tuple):
    __slots__ = ()


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (Config, r"a Config with a tensor in `\.weight`"),
        (Slots, r"`\.weights\[0\]\[1\]`"),
        (lambda x: Pair((1, x)), r"`\[1\]`"),
        (lambda x: Config({"w": x}), r"`\.weight\['w'\]`"),
        (lambda x: Config({x}), r"`\.weight\[0\]`"),
        (lambda x: Config(Config(x)), r"`\.weight\.weight`"),
        (lambda x: functools.partial(torch.add, x), r"`\.args\[0\]`"),
        (lambda x: WithBuffer(x).forward, r"`\.__self__\.x`"),
        (lambda x: WithBuffer(x), r"`\.x`"),
    ],
)
def test_static_objects_with_tensors(make, place):
    f = jtbridge.to_torch_function(lambda x, config: x)
    with pytest.raises(ArgumentError, match=rf"Argument `config` of `<lambda>` is .*{place}, whose values"):
        f(torch.ones(2), config=make(torch.ones(2)))
    assert f(torch.ones(2), config=make(3)).tolist() == [1.0, 1.0]


def test_keyword_arguments_are_named():
    with pytest.raises(ArgumentError, match=r"`y\[1\]` of `f`"):
        jtbridge.to_torch_function(named("f", lambda x, y: x))(torch.ones(1), y=(1, set()))


def named(name, function):
    function.__name__ = name
    return function


def test_two_devices():
    with pytest.raises(DeviceError, match="lie on `cpu` and on `meta`"):
        jtbridge.to_torch_function(lambda x, y: x + y)(torch.ones(2), torch.ones(2, device="meta"))


def test_tracers():
    with pytest.raises(ArgumentError, match="is a JAX tracer, but this is a torch function"):
        jax.jit(double)(jnp.ones(2))


@pytest.mark.parametrize("result", ["text", object(), jnp.sin], ids=["str", "object", "function"])
def test_results_that_are_not_arrays_are_refused(result):
    with pytest.raises(ArgumentError, match="which is not an array"):
        jtbridge.to_torch_function(lambda x: (x, result))(torch.ones(2))


def test_keys_as_results():
    with pytest.raises(DTypeError, match="key_data"):
        jtbridge.to_torch_function(lambda: jax.random.key(0))()


def test_torch_function_with_tracers_raises_its_own_error():
    with pytest.raises(TypeError):
        jtbridge.to_torch_function(torch.sin)(torch.ones(2))


@pytest.mark.parametrize("wrong", [3, torch.nn.Linear(1, 1), None])
def test_invalid_functions_and_options_are_refused(wrong):
    if wrong is None:
        with pytest.raises(ArgumentError, match="must be 'int64' or 'keep'"):
            jtbridge.to_torch_function(jnp.sin, int32="no")
    else:
        with pytest.raises(ArgumentError, match="to_torch_function"):
            jtbridge.to_torch_function(wrong)


class Mine(Exception):
    pass


def test_exceptions_while_jax_traces():
    fails = [True]

    @jtbridge.to_torch_function
    def f(x):
        if fails:
            raise Mine("here")
        return x + 1

    for call in (f, torch.func.vmap(f), lambda x: f(x.requires_grad_())):
        with pytest.raises(Mine, match="here"):
            call(torch.ones(2))
    fails.clear()
    assert f(torch.ones(2)).tolist() == [2.0, 2.0]


def test_exceptions_when_the_program_runs():
    def check(value):
        if value.sum() > 5:
            raise Mine("too large")

    f = jtbridge.to_torch_function(lambda x: (jax.debug.callback(check, x), x * 2)[1])

    def ordered(x):
        return jax.pure_callback(lambda v: (check(v), v)[1], jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    g = jtbridge.to_torch_function(ordered)
    with pytest.raises(jax.errors.JaxRuntimeError, match="too large"):
        g(torch.full((2,), 5.0))
    assert g(torch.ones(2)).tolist() == [1.0, 1.0]
    assert f(torch.ones(2)).tolist() == [2.0, 2.0]


def test_exceptions_in_the_backward():
    @jax.custom_vjp
    def f(x):
        return x

    def fail(_, ct):
        raise Mine("in the backward")

    f.defvjp(lambda x: (x, None), fail)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(Mine, match="in the backward"):
        torch.func.grad(lambda x: jtbridge.to_torch_function(f)(x).sum())(x.detach())
    with pytest.raises(Mine, match="in the backward"):
        jtbridge.to_torch_function(f)(x).sum().backward()


def test_branches_on_data_raise_the_error_of_jax():
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jtbridge.to_torch_function(lambda x: x if x.sum() > 0 else -x)(torch.ones(2))


def test_an_argument_written_before_the_backward():
    w = torch.ones(2, requires_grad=True)
    value = jtbridge.to_torch_function(lambda w: jnp.sin(w).sum())(w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_a_result_written_before_the_backward():
    w = torch.ones(2, requires_grad=True)
    y = jtbridge.to_torch_function(jnp.exp)(w)  # its gradient uses the result
    y.mul_(2)
    try:
        (gradient,) = torch.autograd.grad(y.sum(), w)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017  (the other way is right too)
    else:
        torch.testing.assert_close(gradient, 2 * w.detach().exp())


def test_integers_have_no_gradient():
    with pytest.raises(RuntimeError, match="floating point"):
        double(torch.ones(2, dtype=torch.int64).requires_grad_())
    assert not double(torch.ones(2, dtype=torch.int64)).requires_grad


def test_forward_mode_of_a_function_with_only_a_reverse_rule():
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
    with pytest.raises(TypeError, match="custom_vjp"):
        torch.func.jvp(jtbridge.to_torch_function(f), (torch.ones(2),), (torch.ones(2),))


def test_an_argument_with_keys_that_jax_cannot_sort():
    f = jtbridge.to_torch_function(lambda batch, *, other: batch["b"])
    x = torch.ones(2)
    with pytest.raises(ArgumentError, match=r"`argument 0\[1\]` is a dict with the keys 'b', 1, which JAX cannot sort"):
        f([x, {"b": x, 1: x}], other=x)
    with pytest.raises(ArgumentError, match=r"`other\['a'\]` is a dict with the keys 'b', 1, which JAX cannot sort"):
        f(x, other={"a": {"b": x, 1: x}})


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f, x: torch.autograd.grad(f(x), x, torch.eye(3), is_grads_batched=True),
        lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
        lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
    ],
)
def test_batches_of_gradients_outside_of_torch_func(differentiate):
    f = jtbridge.to_torch_function(lambda x: jnp.sin(x) * x)
    x = torch.rand(3, requires_grad=True)
    with pytest.raises(DifferentiationError, match=r"is_grads_batched=True.*Use `torch\.func`"):
        differentiate(f, x)
    torch.testing.assert_close(torch.func.jacrev(f)(x), torch.diag(x.cos() * x + x.sin()))
