"""Numbers that are read by ``.item()`` and only compared are conditions of the program; other uses are calls."""

from __future__ import annotations

import copy
import math
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge import errors

X = jnp.arange(1.0, 5.0)
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


def truth(condition, x):
    """Whether a condition holds in a translated program."""
    f = jtbridge.wrap(lambda v: torch.ones(()) if condition(v) else torch.zeros(()), backend="xla")
    return bool(jax.jit(f)(x))


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [0.1, 0.3, 1.0, -7, 1e300, -math.inf, math.nan])
def test_floats_are_compared_as_python_floats(compare, dtype, number):
    values = torch.tensor([0.1, 0.3, 1.0, -7.0, 1e30, math.inf, -math.inf, math.nan], dtype=dtype)

    def f(v):
        holds = torch.ones(()) if compare(v.item(), number) else torch.zeros(())
        return holds + (2 if compare(number, v.item()) else 0)

    got = jax.jit(jax.vmap(jtbridge.wrap(f, backend="xla")))(jtbridge.to_jax(values))
    assert got.tolist() == [float(f(value)) for value in values]


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint8])
def test_integers_are_compared_as_python_integers(compare, dtype):
    for number in (-1, 2, 2.5, -2.5, 2.0, True, 255, 300):
        f = jtbridge.wrap(lambda v, n=number: v * 0 + 1 if compare(v.max().item(), n) else v * 0, backend="xla")
        program = jax.jit(f)
        for value in (0, 1, 2, 3, 127):
            assert bool(program(np.full(2, value, dtype)).all()) == compare(value, number), (value, number)


def test_the_number_is_the_one_that_was_read():
    def f(v):
        n = v[0].item()
        v = v.add_(1)
        return v * 2 if n > 1 else v

    program = jax.jit(jtbridge.wrap(f, backend="xla"))
    np.testing.assert_array_equal(program(X), X + 1)
    np.testing.assert_array_equal(program(X + 1), 2 * X + 4)


def test_value_check_gives_the_result_if_it_passes():
    def f(v):
        if (v > 2).sum().item() > 3:
            raise ValueError("too many")
        return v * 2

    program = jax.jit(jtbridge.wrap(f, backend="xla"))
    np.testing.assert_array_equal(program(X), X * 2)
    assert np.isnan(program(X + 5)).all()


def test_gradients_take_the_same_branch():
    f = jtbridge.wrap(lambda v: (v**2).sum() if v.sum().item() > 0 else v.sum(), backend="xla")
    np.testing.assert_array_equal(jax.jit(jax.grad(f))(X), 2 * X)
    np.testing.assert_array_equal(jax.jit(jax.grad(f))(-X), jnp.ones(4))
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.grad(f)))(jnp.stack([X, -X])), jnp.stack([2 * X, jnp.ones(4)]))


def test_a_number_counts_as_the_type_that_item_returns():
    assert truth(lambda v: isinstance(v.sum().item(), float) and not isinstance(v.argmax().item(), float), X)
    assert truth(lambda v: isinstance(v.argmax().item(), int) and v.argmax().item() is not None, X)
    assert not truth(lambda v: v.argmax().item() in (None, "3", 2), X)
    assert not truth(lambda v: hasattr(v.argmax().item(), "shape") or v.argmax().item() == 0, X)


def test_a_copy_of_a_number_is_the_number():
    assert truth(lambda v: copy.deepcopy(v[0].item()) == copy.copy(v[0].item()) == 1, X)


def test_numbers_that_are_constants_have_values():
    f = jtbridge.wrap(lambda v: v[: torch.tensor([1, 3]).max().item()] * 2, backend="xla")
    np.testing.assert_array_equal(jax.jit(f)(X), X[:3] * 2)


USES = {
    "factor": lambda v: v * v[0].item(),
    "exponent": lambda v: v ** v[0].item(),
    "index": lambda v: v[v.argmax().item()],
    "size": lambda v: v.new_ones(v.argmax().item()).sum(),
    "result": lambda v: (v, v[0].item()),
    "sum": lambda v: v * 2 if v[0].item() + 1 > 2 else v,
    "bits": lambda v: v * 2 if v.argmax().item() & 1 else v,
    "quotient": lambda v: v * divmod(v.argmax().item(), 2)[0],
    "method": lambda v: v * 2 if v[0].item().is_integer() else v,
    "pickle": lambda v: v * 2 if pickle.dumps(v[0].item()) else v,
    "text": lambda v: v * 2 if f"{v[0].item()}" == "1.0" else v,
    "key": lambda v: v * {1.0: 2, 2.0: 3}.get(v[0].item(), 1),
    "NumPy number": lambda v: v * 2 if v[0].item() == np.float64(1.0) else v,
    "NumPy array": lambda v: v * 2 if np.isclose(v[0].item(), 1.0) else v,
    "conversion": lambda v: v * 2 if math.sqrt(v[0].item()) > 1 else v,
    "integer beyond int32": lambda v: v * 2 if v.argmax().item() < 2**40 else v,
    "tensor": lambda v: v * 2 if (v[0].item() == v).any() else v,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
def test_other_uses_are_called(use):
    function = USES[use]
    with pytest.raises(errors.TranslationError):
        jax.jit(jtbridge.wrap(function, backend="xla"))(X)
    for x in (X, X + 1):
        want, got = function(jtbridge.to_torch(x)), jax.jit(jtbridge.wrap(function))(x)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
