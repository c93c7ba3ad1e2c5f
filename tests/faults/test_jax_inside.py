"""JAX used by a torch function that a JAX program calls: refused, because the call could wait for ever."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import JaxCallError

pytestmark = pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")

X = jnp.arange(4.0)
TYPE = jax.ShapeDtypeStruct((4,), jnp.float32)

# Operations of JAX on values that left torch.
USES: dict[str, Callable[[np.ndarray], jax.Array]] = {
    "sin": jnp.sin,
    "a jitted function": jax.jit(lambda x: jnp.sin(x) * 1),
    "a function that was compiled before": jnp.sin,
    "a loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(x), x),
    "grad": lambda x: jax.vmap(jax.grad(lambda v: -jnp.cos(v)))(x),
    "a custom rule": lambda x: jax.nn.relu(x) * 0 + np.sin(x),
    "a draw": lambda x: jax.random.normal(jax.random.key(0), (4,)) * 0 + np.sin(x),
    "asarray": lambda x: jnp.asarray(x) * 0 + np.sin(x),
    "a wrapped JAX function": jtbridge.wrap(torch.sin),
}


def uses_jax(use: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.array(USES[use](x.detach().numpy())))

    return fn


@pytest.mark.parametrize("use", [use for use in USES if use != "a wrapped JAX function"])
@pytest.mark.parametrize("name", ["auto", "dlpack", "callback"])
def test_jax_call_is_refused_in_a_program(use: str, name: str):
    fn = uses_jax(use)
    jax.block_until_ready(jnp.sin(X))
    np.testing.assert_allclose(jtbridge.wrap(fn, backend=name)(X), np.sin(X), rtol=1e-6)  # eagerly there is no program
    with pytest.raises(JaxCallError, match=r"JAX cannot run inside a callback.*to_torch_function"):
        jax.jit(jtbridge.wrap(fn, backend=name))(X)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"JaxCallError: .*JAX cannot run inside a callback"):
        jax.block_until_ready(jax.jit(jtbridge.wrap(fn, backend=name, output_shapes=TYPE))(X))
    np.testing.assert_allclose(jnp.sin(X), np.sin(X), rtol=1e-6)  # JAX itself is unchanged
    np.testing.assert_allclose(jax.jit(jtbridge.wrap(torch.sin, backend=name))(X), np.sin(X), rtol=1e-6)


@pytest.mark.parametrize("name", ["dlpack", "callback"])
def test_wrapped_function_inside_runs_as_torch(name: str):
    inner = jtbridge.wrap(torch.sin)
    f = jax.jit(jtbridge.wrap(lambda x: inner(x) * 2, backend=name))
    np.testing.assert_allclose(f(X), 2 * np.sin(X), rtol=1e-6)


@pytest.mark.parametrize("name", ["dlpack", "callback"])
def test_an_array_of_jax_that_is_only_read(name: str):
    weights = jnp.full(4, 3.0)
    f = jtbridge.wrap(lambda x: x * torch.from_numpy(np.array(weights)) if x.numpy().any() else x, backend=name)
    np.testing.assert_allclose(jax.jit(f)(X), 3 * X)
