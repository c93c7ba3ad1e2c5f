"""Torch's settings at the time of a trace apply when the program runs, whatever the settings of the calling thread."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import CalledWarning, JtbridgeError, MutationError, TranslationError

from .compare import assert_matches

X = jnp.array([[0.5, -1.0], [2.0, 3.0]])
T = torch.tensor([[0.5, -1.0], [2.0, 3.0]])


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
}


def settings() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.get_default_dtype(),
    )


@pytest.fixture(autouse=True)
def settings_are_put_back() -> Iterator[None]:
    before = settings()
    yield
    assert settings() == before


OTHERS = [name for name in SETTINGS if name != "none"]
CHANGES = [(a, "none") for a in OTHERS] + [("none", a) for a in OTHERS] + [("autocast", "inference")]


@pytest.fixture(params=CHANGES, ids="-".join)
def change(request: pytest.FixtureRequest) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The settings of the trace, and those of the call."""
    traced, called = request.param
    return SETTINGS[traced], SETTINGS[called]


@pytest.fixture(params=SETTINGS)
def traced(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return SETTINGS[request.param]


def test_run_time_settings_match_the_trace(change: tuple[Callable, Callable], backend: str):
    traced, called = change
    seen = []
    f = jax.jit(jtbridge.wrap(lambda x: (seen.append(settings()), x * 2)[1], purity="allow"))
    with traced():
        expected = settings()
        compiled = f.lower(X).compile()
    seen.clear()
    with called():
        before = settings()
        assert compiled(X).tolist() == (2 * T).tolist()
        assert settings() == before
    # Torch has one default dtype for all threads, so it is not restored for a call.
    assert [found[:-1] for found in seen] == [expected[:-1]]


def test_results_match_the_trace(change: tuple[Callable, Callable], backend: str):
    traced, called = change

    def fn(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "autocast": x @ x,
            "default": torch.ones(2) / 3,
            "recording": torch.tensor(torch.is_grad_enabled()),
        }

    f = jax.jit(jtbridge.wrap(fn))
    with traced():
        expected = {name: y.clone() for name, y in fn(T).items()}
        compiled = f.lower(X).compile()
    dtype = torch.get_default_dtype()
    with traced():
        same_dtype = torch.get_default_dtype() is dtype
    with called():
        same_dtype = same_dtype and torch.get_default_dtype() is dtype
        if backend in ("dlpack", "callback") and not same_dtype:
            with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="Pass `dtype=` where the function"):
                jax.block_until_ready(compiled(X))
            return
        found = compiled(X)
    assert_matches(found, expected)


def test_eager_calls_follow_the_thread(change: tuple[Callable, Callable], backend: str):
    traced, called = change
    f = jtbridge.wrap(lambda x: x @ x * (2 if torch.is_grad_enabled() else 3))
    for setting in (traced, called, traced):
        with setting():
            expected = ((T @ T) * (2 if torch.is_grad_enabled() else 3)).clone()
            found = f(X)
        assert_matches(found, expected)


@pytest.mark.parametrize("jit", [False, True])
def test_gradients_match_torch_for_all_settings(change: tuple[Callable, Callable], jit: bool, backend: str):
    traced, called = change
    f = jtbridge.wrap(lambda x: torch.tanh(x) ** 2)
    run = jax.value_and_grad(lambda x: f(x).sum())
    run = jax.jit(run) if jit else run
    t = T.clone().requires_grad_()
    value = (torch.tanh(t) ** 2).sum()
    expected = (value.detach(), torch.autograd.grad(value, t)[0])
    for setting in (traced, called):
        with setting():
            assert_matches(run(X), expected)


@pytest.mark.parametrize("setting", ["no_grad", "inference"])
def test_other_derivatives_without_recording(setting: str, backend: str):
    f = jtbridge.wrap(lambda x: (x**3).sum())
    x, t = jnp.array([1.0, 2.0]), torch.tensor([1.0, 2.0])
    for transform in (jax.jit, lambda g: g):
        with SETTINGS[setting]():
            hessian = transform(jax.hessian(f))(x)
            tangent = transform(lambda x: jax.jvp(f, (x,), (x,))[1])(x)
            rows = transform(jax.vmap(jax.grad(f)))(jnp.stack([x, x]))
        assert_matches(hessian, torch.diag(6 * t))
        assert_matches(tangent, (3 * t**3).sum())
        assert_matches(rows, torch.stack([3 * t**2, 3 * t**2]))


def test_gradient_of_weights_inside_a_module_traced_without_recording(backend: str):
    model = torch.nn.Linear(2, 1)
    f = jtbridge.wrap(model)
    with torch.no_grad():
        found = jax.jit(jax.grad(lambda x: f(x).sum()))(X)
    assert_matches(found, model.weight.detach().expand(2, 2))


def test_autocast_in_the_backward(backend: str):
    f = jtbridge.wrap(lambda x: (x @ x).float().sum())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = jax.jit(jax.grad(f)).lower(X).compile()
        t = T.clone().requires_grad_()
        (expected,) = torch.autograd.grad((t @ t).float().sum(), t)
    assert_matches(run(X), expected, tolerance=2e-2)
    assert run(X).dtype == jnp.float32


@pytest.mark.parametrize("jit", [False, True])
def test_default_device_of_the_caller_is_not_that_of_the_program(jit: bool, backend: str):
    f = jax.jit(jtbridge.wrap(lambda x: x + torch.ones(2)))
    compiled = f.lower(X).compile() if jit else f
    compiled(X)
    with torch.device("meta"):
        assert compiled(X).tolist() == (T + 1).tolist()


def test_another_thread(traced: Callable, backend: str):
    f = jax.jit(jtbridge.wrap(lambda x: x @ x * (2 if torch.is_grad_enabled() else 3)))
    with traced():
        compiled = f.lower(X).compile()
        expected = ((T @ T) * (2 if torch.is_grad_enabled() else 3)).clone()
    found = []
    thread = threading.Thread(target=lambda: found.append(compiled(X)))
    thread.start()
    thread.join()
    assert_matches(found[0], expected)


def test_settings_are_restored_after_an_exception(traced: Callable, backend: str):
    def fail(x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 0:
            raise LookupError("positive")
        return x

    f = jax.jit(jtbridge.wrap(fail))
    with traced():
        compiled = f.lower(X).compile()
    message = "default dtype" if traced is SETTINGS["float64"] else "LookupError: positive"
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(compiled(X))


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_assignment_to_data_matches_torch(backend: str):
    def swapping(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.data = torch.full((3,), 7.0)
        return y * x

    f = jtbridge.wrap(swapping, backend=backend)
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    want = swapping(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalledWarning)
        np.testing.assert_array_equal(jax.jit(f)(jnp.arange(1.0, 4)), want.detach())
        got = jax.jit(jax.grad(lambda x: f(x).sum()))(jnp.arange(1.0, 4))
    np.testing.assert_array_equal(got, torch.autograd.grad(want.sum(), x)[0])
    with pytest.raises(TranslationError, match=r"assigns to `.data`"):
        jtbridge.wrap(swapping, backend="xla")(jnp.ones(3))


def test_data_assignment_to_closed_over_tensors_is_refused():
    layer = torch.nn.Linear(2, 2)
    before = layer.weight.clone()

    def decaying(x: torch.Tensor) -> torch.Tensor:
        layer.weight.data = layer.weight.data * 0.5
        return layer(x)

    with pytest.raises(MutationError, match=r"closed-over tensor of shape|`Linear.weight`"):
        jax.jit(jtbridge.wrap(decaying))(jnp.ones(2))
    assert torch.equal(layer.weight, before)


def test_clear_cache_rereads_inference_mode_tensors():
    with torch.inference_mode():
        scale = torch.ones(3)
    f = jtbridge.wrap(lambda x: x * scale, backend="xla")
    assert f(jnp.ones(3)).tolist() == [1, 1, 1]
    with torch.inference_mode():
        scale.mul_(3)
    assert f(jnp.ones(3)).tolist() == [1, 1, 1]  # as under `jax.jit`
    f.clear_cache()
    assert f(jnp.ones(3)).tolist() == [3, 3, 3]


@pytest.mark.parametrize("by", ["dlpack", "callback"])
def test_subnormal_numbers_are_not_flushed_in_called_functions(by: str):
    """XLA's threads treat them as zero, but this thread does not."""
    x = torch.tensor([1e-40, -1e-42, 0.0, 1.0])

    def fn(x):
        return x > 0, x.sign(), x.abs().log(), x.count_nonzero()

    wrapped = jtbridge.wrap(fn, backend=by)
    assert_matches(jax.jit(wrapped)(jnp.asarray(x.numpy())), fn(x))
    assert_matches(wrapped(jnp.asarray(x.numpy())), fn(x))
    assert jax.jit(lambda x: x * 1.5)(jnp.float32(2.0)) == 3.0


def in_double_inside(x):
    torch.set_default_dtype(torch.float64)
    small, one = torch.full((3,), 1e-9), torch.ones(3)
    torch.set_default_dtype(torch.float32)
    return (((small + one) - 1) * 1e9 * x).float()


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_another_default_dtype_inside(backend: str):
    f, x = jtbridge.wrap(in_double_inside, backend=backend), jnp.arange(3.0)
    want = in_double_inside(torch.arange(3.0)).numpy()
    np.testing.assert_allclose(jax.jit(f)(x), want)
    np.testing.assert_allclose(jax.jit(lambda x: jax.vjp(f, x)[1](x)[0])(x), want)
    np.testing.assert_allclose(f(x), want)
    assert torch.get_default_dtype() is torch.float32


def test_settings_are_restored_after_a_failed_trace():
    def f(x):
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        y = x[x > 0] * 2  # its size depends on data
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        return y

    with pytest.raises(JtbridgeError):
        jax.jit(jtbridge.wrap(f, backend="xla"))(jnp.arange(3.0))
    assert torch.get_default_dtype() is torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
