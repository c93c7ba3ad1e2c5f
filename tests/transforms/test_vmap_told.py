"""vmap of functions that read the strides, the base or the text of a tensor: each row gets its own values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

WEIGHT = torch.linspace(-1, 1, 18).reshape(3, 6)
MADE = {
    "argument": lambda x: x,
    "transposed": lambda x: x.T,
    "new": lambda x: x + 1,
    "product": lambda x: WEIGHT.T @ x[0],
    "flat": lambda x: x.reshape(-1),
    "column": lambda x: x[:, 1],
    "batch_norm": lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
}
TOLD = {
    "stride": lambda y, x: sum(y.stride()),
    "is_contiguous": lambda y, x: y.is_contiguous(),
    "stride of zeros": lambda y, x: torch.zeros_like(y).stride(0),
    "_base is None": lambda y, x: y._base is None,
    "_base is x": lambda y, x: y._base is x,
    "_is_view": lambda y, x: y._is_view(),
    "repr": lambda y, x: len(repr(y)),
    "f-string": lambda y, x: len(f"{y}, {y.sum()}"),
}


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("made", MADE)
def test_metadata_of_a_row_is_independent_of_the_batch(made, told):
    def fn(x):
        y = MADE[made](x)
        return y * (1 + float(TOLD[told](y, x)))

    rows = torch.arange(24.0).reshape(2, 4, 3)
    expected = torch.stack([fn(row.clone()) for row in rows])
    for by in ("auto", "dlpack"):
        f = jax.vmap(jtbridge.wrap(fn, backend=by))
        np.testing.assert_allclose(f(jnp.asarray(rows.numpy())), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(jax.jit(f)(jnp.asarray(rows.numpy())), expected, rtol=1e-5, atol=1e-5)
