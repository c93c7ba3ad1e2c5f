"""Strides of results: they decide whether `flatten` returns a view, so that writes to it change its base."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import jtbridge

pytestmark = pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 3, 5)), jnp.float32)
ROW = torch.arange(5.0)
CONTIGUOUS = torch.ones(4, 3, 5)

OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channel_shuffle": lambda x: torch.channel_shuffle(x, 2),
    "roll": lambda x: x.roll(1, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "rrelu": lambda x: F.rrelu(x, training=False),
    "logsigmoid": F.logsigmoid,
    "copysign": lambda x: torch.copysign(x, CONTIGUOUS),
    "floor_divide": lambda x: x[0] // CONTIGUOUS,
    "div": lambda x: torch.div(x[0], CONTIGUOUS, rounding_mode="floor"),
    "ldexp": lambda x: torch.ldexp(x[0], CONTIGUOUS),
    "logaddexp": lambda x: torch.logaddexp(x[0], CONTIGUOUS),
    "heaviside": lambda x: torch.heaviside(x[0], CONTIGUOUS),
    "reflection_pad3d": lambda x: F.pad(x[None], (1, 1, 1, 1, 1, 1), mode="reflect"),
    "replication_pad3d": lambda x: F.pad(x[None], (1, 1, 1, 1, 1, 1), mode="replicate"),
}
# Functions whose gradients have unusual strides. The weights keep a gradient from being an expanded number.
WEIGHTS = torch.arange(120.0).reshape(2, 4, 3, 5)
DIFFERENTIATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True) * WEIGHTS,
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(2, 3, 5, dtype=torch.int64)),
    "glu": lambda x: F.glu(x, 0) * WEIGHTS[:1],
    "huber_loss": lambda x: F.huber_loss(x, WEIGHTS),
    "layer_norm": lambda x: F.layer_norm(x, (5,)) * WEIGHTS,
    "replication_pad2d": lambda x: F.pad(x, (0, 1, 1, 0), mode="replicate") ** 2,
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, WEIGHTS),
}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.mT.contiguous().mT,
    "reversed": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "contiguous": lambda x: x,
}


@pytest.mark.parametrize("by", ["auto", "xla", "dlpack"])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_write_to_a_flat_view_or_copy(name: str, by: str):
    for layout, laid_out in LAYOUTS.items():
        for start in (0, 1):

            def fn(x: torch.Tensor, laid_out=laid_out, start=start) -> torch.Tensor:
                y = OPERATORS[name](laid_out(x))
                y.flatten(start).mul_(2)
                return y

            for f in (jtbridge.wrap(fn, backend=by), jtbridge.wrap(torch.no_grad()(fn), backend=by)):
                want = fn(torch.from_numpy(np.array(X)))
                np.testing.assert_allclose(jax.jit(f)(X), want, rtol=1e-5, atol=1e-6, err_msg=f"{layout} {start}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout: str):
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.channel_shuffle(LAYOUTS[layout](x) ** 2, 2) * 1
        y.flatten()[:3].mul_(2)
        return y.roll(1, 2).sin()

    f = jtbridge.wrap(fn)
    np.testing.assert_allclose(
        jax.jit(jax.grad(lambda x: f(x).sum()))(X), jax.grad(lambda x: f(x).sum())(X), rtol=1e-5, atol=1e-6
    )


def _strides(of: Callable[[torch.Tensor], torch.Tensor], layout: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function whose result has the strides of `of` as its shape, so that only shapes are computed."""
    return lambda x: torch.zeros(()).expand(of(LAYOUTS[layout](x)).stride())


FUNCTIONS = {
    **OPERATORS,
    "rpow": lambda x: 2**x,
    **{f"gradient of {name}": torch.func.grad(lambda x, of=of: of(x).sum()) for name, of in DIFFERENTIATED.items()},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_strides_match_torch(name: str, layout: str):
    strides = _strides(FUNCTIONS[name], layout)
    assert jax.eval_shape(jtbridge.wrap(strides), X).shape == tuple(strides(torch.from_numpy(np.array(X))).shape)
