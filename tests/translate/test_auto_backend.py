"""Under a trace `auto` translates functions that can be translated, calls the rest, and warns once."""

from __future__ import annotations

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import BackendError, CalledWarning, TranslationError
from tests.compare import assert_matches
from tests.counting import counted, counted_square

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


def reads_a_value(x: torch.Tensor) -> torch.Tensor:
    return x * (2 + x.sum().item())


def through_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(np.sort(x.numpy(), axis=-1))


def as_hlo(f, *args) -> str:
    return jax.jit(lambda *args: f(*args)).lower(*args).as_text()


def test_translated_program_contains_no_call():
    f = jtbridge.wrap(lambda x: torch.softmax(x, -1))
    assert "custom_call" not in as_hlo(f, X)
    assert "custom_call" not in as_hlo(jax.grad(lambda x: f(x)[0, 0]), X)
    with jtbridge.config(backend="dlpack"):
        assert "custom_call" in as_hlo(f, X)


@pytest.mark.parametrize("fn", [reads_a_value, through_numpy])
def test_untraceable_function_is_called(fn):
    f = jtbridge.wrap(fn)
    want = fn(torch.tensor(np.asarray(X)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_matches(f(X), want)  # an eager call gives no warning: torch runs it
    with pytest.warns(CalledWarning, match=f'`{fn.__name__}` is called through backend "dlpack"') as seen:
        got = jax.jit(lambda x: f(x))(X)
    assert_matches(got, want)
    assert __file__ in str(seen[0].message)  # the line that prevents a translation
    assert seen[0].filename == __file__  # the line that called it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(X)
        assert_matches(jax.jit(lambda x: f(x))(X), want)  # another trace
        jax.jit(lambda x: f(x))(X[0])  # another signature of the same function


def test_an_operator_without_lowering_is_called_and_named():
    f = jtbridge.wrap(counted_square)
    want = torch.tensor(np.asarray(X)) ** 2
    with counted() as counts, pytest.warns(CalledWarning, match="jtbridge_tests.counted_square.default"):
        assert_matches(jax.jit(f)(X), want)
    assert counts == {"forward": 1}
    with counted() as counts, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_matches(jtbridge.wrap(counted_square)(X), want)
    assert counts == {"forward": 1}


def test_forced_translation_names_operator_line_and_remedy():
    def fn(x):
        return counted_square(x)  # this line

    with pytest.raises(TranslationError) as raised:
        jtbridge.wrap(fn, backend="xla")(X)
    line = fn.__code__.co_firstlineno + 1
    assert str(raised.value) == (
        "Backend `xla` was asked for, but `fn`: operator `jtbridge_tests.counted_square.default` "
        f"({__file__}:{line}) has no lowering. Register one with "
        "`jtbridge.register_lowering(torch.ops.jtbridge_tests.counted_square.default)`, or call torch instead: "
        'backend="dlpack" or "callback".'
    )


def test_forced_translation_reports_a_data_dependent_shape():
    with pytest.raises(jtbridge.errors.DataDependentShapeError, match="depends on the values"):
        jtbridge.wrap(torch.nonzero, backend="xla")(X)


def test_ordered_effects_are_never_translated(capfd):
    f = jtbridge.wrap(lambda x: (sys.stdout.write("called"), x)[1], effects="ordered")
    jax.jit(f)(X).block_until_ready()
    jax.effects_barrier()
    assert "called" in capfd.readouterr().out


def test_lowering_for_several_platforms():
    lower = jax.jit(jtbridge.wrap(torch.tanh)).trace(X).lower
    text = lower(lowering_platforms=("cpu", "cuda", "tpu")).as_text()
    assert "custom_call" not in text
    with pytest.raises(BackendError, match="cannot be lowered for several platforms"):
        jax.jit(jtbridge.wrap(torch.tanh, backend="callback")).trace(X).lower(lowering_platforms=("cpu", "cuda"))


def test_runs_on_other_devices_than_the_first():
    device = jax.devices()[1]
    y = jtbridge.wrap(torch.exp)(jax.device_put(X, device))
    assert y.devices() == {device}


def test_is_partitioned_under_plain_jit():
    """Rows on four devices stay there: nothing is gathered."""
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("rows"))
    x = jax.device_put(jnp.arange(32.0).reshape(8, 4), rows)
    f = jax.jit(jtbridge.wrap(lambda x: torch.softmax(x, -1) * 2))
    assert f(x).sharding.is_equivalent_to(rows, 2)
    assert "all-gather" not in f.lower(x).compile().as_text()


def test_64_bit_values_keep_their_width_while_x64_is_off():
    """float64 inside the function is float64, as in torch, though JAX's own arrays are 32 bits wide."""

    def fn(x):
        return ((x.double() + 1e-12) - x.double()).float()

    assert_matches(jax.jit(jtbridge.wrap(fn, backend="xla"))(X), fn(torch.tensor(np.asarray(X))))


def test_int64_arithmetic_does_not_wrap_at_32_bits():
    def fn(i):
        return (i * 3_000_000_000) // 1_000_000_000

    got = jtbridge.wrap(fn, backend="xla")(jnp.arange(5))
    assert got.tolist() == [0, 3, 6, 9, 12]
