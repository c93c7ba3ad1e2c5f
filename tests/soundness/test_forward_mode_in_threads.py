"""Functions that use torch's forward mode inside, called by XLA while another thread also uses it.

Torch has one level of forward mode per process: a thread that leaves it removes the tangents of all other threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import jtbridge
from jtbridge._compat import functorch_depth
from jtbridge.core import forward_mode
from jtbridge.core.forward_mode import named_forward_mode
from jtbridge.core.nested_calls import as_xla_callback
from jtbridge.errors import DifferentiationError

pytestmark = [pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"), pytest.mark.usefixtures("x64")]

X = np.array([1.0, 2.0, 3.0])
WANT = X * np.cos(X) + np.sin(X)  # the derivative of x sin(x)

inside, proceed = threading.Event(), threading.Event()
waits = threading.local()  # `seconds` on a thread that waits for a time, not for `proceed`


def product(t: torch.Tensor) -> torch.Tensor:
    """Compute t sin(t); in between, let another thread run."""
    sine = t.sin()
    waits.ran = True
    inside.set()
    if hasattr(waits, "seconds"):
        time.sleep(waits.seconds)
    else:
        proceed.wait(1.0)
    return sine * t


def slope(x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(product, (x,), (torch.ones_like(x),))[1]


def slope_of_columns(x: torch.Tensor) -> torch.Tensor:
    return torch.func.jacfwd(product)(x).sum(0)


def slope_by_dual_tensors(x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(product(dual)).tangent


def slope_through_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(slope(x).numpy() * 1.0)


def slope_at_values(x: torch.Tensor) -> torch.Tensor:
    return slope(x) if float(x.sum()) > -1 else slope(x) * 0


FUNCTIONS = [slope, slope_of_columns, slope_by_dual_tensors, slope_through_numpy]


@pytest.fixture(autouse=True)
def no_level() -> Iterator[None]:
    waits.seconds = 0.0
    inside.clear()
    proceed.clear()
    yield
    proceed.set()
    jax.effects_barrier()
    assert forward_ad._current_level == -1
    with forward_ad.dual_level():
        pass


def program(fn: Callable, backend: str = "callback") -> Callable:
    """Return a compiled program that runs on a thread of XLA: its argument is computed first."""
    wrapped = jtbridge.wrap(fn, backend=backend, output_shapes=jax.ShapeDtypeStruct((3,), jnp.float64))
    work = jnp.ones((1000, 1000))
    begin = jax.jit(lambda a: (a @ a @ a)[:3, 0] * 0 + jnp.asarray(X))
    run = jax.jit(wrapped)
    proceed.set()
    np.testing.assert_allclose(run(begin(work)), WANT)  # compiles
    proceed.clear()
    inside.clear()
    vars(waits).pop("ran", None)
    return lambda: run(begin(work))


def start(run: Callable) -> jax.Array:
    """Start a program; return when its function is between two operators of its forward mode."""
    result = run()
    assert inside.wait(20)
    assert not hasattr(waits, "ran"), "the program ran on this thread"
    return result


@pytest.mark.parametrize("backend", ["callback", "dlpack"])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_while_a_derivative_is_traced(fn: Callable, backend: str) -> None:
    def traced(x: torch.Tensor) -> torch.Tensor:
        y = x.cos()
        if functorch_depth():  # as in the trace of the derivative
            proceed.set()
            time.sleep(0.2)
        return y * x

    found = start(program(fn, backend))
    tangent = jax.jit(lambda x: jax.jvp(jtbridge.wrap(traced), (x,), (jnp.ones_like(x),))[1])(jnp.asarray(X))
    np.testing.assert_allclose(tangent, np.cos(X) - X * np.sin(X))
    np.testing.assert_allclose(found, WANT)


@pytest.mark.parametrize("call", [jtbridge.wrap(slope), lambda x: slope(torch.from_numpy(np.array(x)))])
def test_while_torch_computes_forward_mode_on_another_thread(call: Callable) -> None:
    x = jnp.asarray(X)
    found = start(program(slope))
    threading.Timer(0.1, proceed.set).start()
    waits.seconds = 0.3  # the function of the program ends first
    np.testing.assert_allclose(call(x), WANT)
    np.testing.assert_allclose(found, WANT)


def test_program_started_inside_torch_forward_mode() -> None:
    run = program(slope)
    found = []

    def begun(t: torch.Tensor) -> torch.Tensor:
        sine = t.sin()
        threading.Timer(0.6, proceed.set).start()
        found.append(run())
        time.sleep(0.4)
        return sine * t

    x = torch.from_numpy(X)
    np.testing.assert_allclose(torch.func.jvp(begun, (x,), (torch.ones_like(x),))[1], WANT)
    np.testing.assert_allclose(found[0], WANT)


def test_program_awaited_inside_torch_forward_mode() -> None:
    run = program(slope)
    proceed.set()

    def scaled(t: torch.Tensor) -> torch.Tensor:
        return t.sin() * t * float(np.asarray(run())[0])

    x = torch.from_numpy(X)
    np.testing.assert_allclose(torch.func.jvp(scaled, (x,), (torch.ones_like(x),))[1], WANT * WANT[0])


def test_forward_mode_level_that_ends_too_early_is_refused() -> None:
    run = program(slope)
    found = []

    def begun(t: torch.Tensor) -> torch.Tensor:
        sine = t.sin()
        found.append(start(run))  # it has shared the level by now
        return sine * t

    x = torch.from_numpy(X)
    np.testing.assert_allclose(torch.func.jvp(begun, (x,), (torch.ones_like(x),))[1], WANT)
    proceed.set()
    with pytest.raises(jax.errors.JaxRuntimeError, match="block_until_ready"):
        np.asarray(found[0])


@pytest.mark.parametrize("fn", [*FUNCTIONS, slope_at_values])
def test_two_concurrent_programs(fn: Callable) -> None:
    run, other = program(fn), program(slope, "dlpack")
    proceed.set()
    wrong = []

    def check(each: Callable) -> None:
        for _ in range(5):
            try:
                with jax.enable_x64(True):
                    np.testing.assert_allclose(each(), WANT)
            except Exception as error:  # noqa: BLE001
                wrong.append(error)

    threads = [threading.Thread(target=check, args=(each,)) for each in (run, other, run, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("owner", ["a trace", "a callback"])
def test_wait_for_a_trace_is_bounded(monkeypatch: pytest.MonkeyPatch, owner: str) -> None:
    monkeypatch.setattr(forward_mode, "_LONGEST", 1)
    held, found = threading.Event(), []

    def hold() -> None:
        with forward_mode.FORWARD_MODE:
            held.set()
            proceed.wait(10)

    def enter() -> None:
        try:
            with forward_mode.FORWARD_MODE:
                found.append(None)
        except DifferentiationError as error:
            found.append(error)

    first = threading.Thread(target=hold if owner == "a trace" else as_xla_callback(hold))
    second = threading.Thread(target=as_xla_callback(enter))
    first.start()
    assert held.wait(10)
    second.start()
    second.join(2.5)
    proceed.set()
    first.join()
    second.join()
    (error,) = found
    assert (error is None) == (owner == "a callback")


def test_uses_of_forward_mode_are_found_in_code() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return slope(x)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)

    model = Model()
    for fn in (slope, slope_of_columns, slope_through_numpy, slope_at_values, model, lambda x: model(x), model.forward):
        assert named_forward_mode(fn) == "torch.func"
    assert named_forward_mode(slope_by_dual_tensors) == "forward_ad"
    for fn in (plain, lambda x: plain(x), torch.nn.Linear(2, 2), np.sum):
        assert named_forward_mode(fn) is None
