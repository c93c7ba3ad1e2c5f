"""Arrays that are deleted, donated, larger than memory, not finite, or of other types than before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

BACKENDS = ("auto", "xla", "dlpack", "callback")
FORMS: dict[str, Callable[[Callable], Callable]] = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda *xs: f(*xs).sum()),
    "vmap": jax.vmap,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BACKENDS)
def test_deleted_and_donated(form: str, name: str):
    f = jtbridge.wrap(lambda x: x * 2, backend=name)
    run = FORMS[form](f)
    deleted, donated = jnp.ones(4) + 1, jnp.ones(4) + 2
    deleted.delete()
    np.testing.assert_array_equal(jax.jit(f, donate_argnums=0)(donated), np.full(4, 6.0))
    assert donated.is_deleted()
    for x in (deleted, donated):
        with pytest.raises(RuntimeError, match="deleted"):
            run(x)
    assert run(jnp.ones(4)).shape == (4,)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_donated_state_in_a_loop(name: str):
    """A result may be in the memory of the donated argument: neither is read after it is written."""
    step = jax.jit(jtbridge.wrap(lambda s, x: (torch.sin(s) + x, s.flip(0)), backend=name), donate_argnums=0)
    state, kept = jnp.arange(6.0), []
    expected, known = torch.arange(6.0), []
    for i in range(20):
        state, out = step(state, jnp.float32(i))
        expected, flipped = torch.sin(expected) + i, expected.flip(0)
        kept.append(out)
        known.append(flipped)
    np.testing.assert_allclose(jnp.stack(kept), torch.stack(known), rtol=1e-5, atol=1e-6)


def too_much(x: torch.Tensor) -> torch.Tensor:
    """Allocate 64 TiB in torch."""
    return x + torch.ones(1 << 44).sum() if x.numpy().any() else x


def too_much_for_xla(x: torch.Tensor) -> torch.Tensor:
    return x.expand(1 << 44, 4) + 1


@pytest.mark.parametrize("name", ["auto", "dlpack", "callback"])
@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
def test_torch_has_no_memory_left(name: str):
    f = jtbridge.wrap(too_much, backend=name, output_shapes=jax.ShapeDtypeStruct((4,), jnp.float32))
    run = jax.jit(f)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            f(jnp.ones(4))
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="can't allocate memory"):
            jax.block_until_ready(run(jnp.ones(4)))
        np.testing.assert_array_equal(f(jnp.zeros(4)), np.zeros(4))
        np.testing.assert_array_equal(run(jnp.zeros(4)), np.zeros(4))


@pytest.mark.parametrize("name", BACKENDS)
def test_xla_has_no_memory_left(name: str):
    with pytest.raises((jax.errors.JaxRuntimeError, RuntimeError), match=r"[Oo]ut of memory|can't allocate memory"):
        jax.block_until_ready(jax.jit(jtbridge.wrap(too_much_for_xla, backend=name))(jnp.ones(4)))
    np.testing.assert_array_equal(jax.jit(jtbridge.wrap(torch.neg, backend=name))(jnp.ones(4)), -np.ones(4))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.complex64, jnp.complex128])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_special_values_are_preserved_bit_for_bit(name: str, jit: bool, dtype: Any, x64: None):
    """NaN with a payload, infinities, negative zero and subnormal numbers are converted unchanged both ways."""
    part = jnp.finfo(dtype).dtype
    word = np.dtype(f"u{part.itemsize}")
    bits = word.type(1) << np.arange(8 * part.itemsize, dtype=word)
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0], part).view(word)
    payloads = special[:1] ^ word.type(5)
    x = np.concatenate([bits, special, payloads, ~bits]).view(part)
    x = x[: len(x) // 2 * 2].view(dtype) if jnp.issubdtype(dtype, jnp.complexfloating) else x
    f = jtbridge.wrap(lambda v: (v.clone(), v.flip(0)), backend=name)
    same, flipped = (jax.jit(f) if jit else f)(jnp.asarray(x))
    assert np.asarray(same).tobytes() == x.tobytes()
    assert np.asarray(flipped).tobytes() == x[::-1].tobytes()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BACKENDS)
def test_alternating_shapes_dtypes_and_trees(form: str, name: str):
    """Call one function with different shapes, dtypes and trees in turn, then with the first ones again."""

    def fn(*args: Any) -> torch.Tensor:
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if leaf is not None]
        return sum((leaf * 2 for leaf in leaves[1:]), start=leaves[0] * 2)

    run = FORMS[form](jtbridge.wrap(fn, backend=name))
    vector, matrix = jnp.ones(3), jnp.full((3, 2), 2.0)
    calls = [
        (vector,),
        (matrix,),
        (vector.astype(jnp.float16),),
        ({"a": vector, "b": vector},),
        ([vector, vector],),
        (vector, (vector, None)),
        ({"b": matrix},),
        (jnp.ones((3, 0)),),
    ]
    for args in (*calls, *calls):
        found = run(*args)
        if form == "grad":
            assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(
                lambda x: (x.shape, x.dtype), args[0]
            )
            for gradient in jax.tree.leaves(found):
                np.testing.assert_array_equal(gradient, np.full(gradient.shape, 2.0))
        else:
            expected = 2 * sum(np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(args))
            np.testing.assert_array_equal(np.asarray(found, np.float32), expected)
