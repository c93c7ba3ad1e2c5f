"""No tensor of a batch outlives the call: a function that keeps a tensor runs row by row, like torch code in a loop."""

from __future__ import annotations

import collections
import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import DataDependentShapeError, MutationError, OutputMismatchError, SequentialVmapWarning

pytestmark = pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
ROWS = jnp.array([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])


class Masked(torch.nn.Module):
    """A mask that is built by the first call."""

    mask: torch.Tensor | None = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones_like(x).cumsum(0)
        return x * self.mask


class Scaled(torch.nn.Module):
    """A scale that the first call takes from its argument, and that later calls double."""

    scale: torch.Tensor | None = None

    def forward(self, x):
        self.scale = x.detach().abs().max() if self.scale is None else self.scale * 2
        return x / self.scale


class Recurrent(torch.nn.Module):
    """A state that each call replaces."""

    state = torch.zeros(3)

    def forward(self, x):
        self.state = torch.tanh(self.state + x).detach()
        return self.state * x


class Counting(torch.nn.Module):
    """A tensor that each call writes to, with values that do not depend on the arguments."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x * self.count.clone()


class Square(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


def appending(compute: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
    def make():
        kept = collections.deque(maxlen=3)

        def f(x):
            y = compute(x)
            kept.append(y)
            return y + len(kept)

        f.kept = kept
        return f

    return make


def with_hook() -> Any:
    linear = torch.nn.Linear(3, 3)
    torch.nn.init.ones_(linear.weight)
    torch.nn.init.zeros_(linear.bias)
    linear.seen = {}
    linear.register_forward_hook(lambda module, inputs, out: module.seen.update(last=out))
    return linear


def traced_by_torchscript() -> Callable[[torch.Tensor], torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(lambda x: x * 3, torch.ones(3), check_trace=False)


def cached() -> Any:
    table = functools.cache(lambda n: torch.arange(n, dtype=torch.float32) * torch.ones(n))
    return lambda x: x * table(3)


MAKE = {
    "lazily built mask": Masked,
    "scale of the first row": Scaled,
    "recurrent state": Recurrent,
    "tensor that counts": Counting,
    "list of results": appending(torch.sin),
    "list of arguments": appending(lambda x: x),
    "parts of a tuple": appending(lambda x: x.chunk(3)[1]),
    "autograd function": appending(Square.apply),
    "traced by TorchScript": lambda: appending(traced_by_torchscript())(),
    "forward hook": with_hook,
    "functools.cache": cached,
}


def tensors_of_batches() -> list[torch.Tensor]:
    gc.collect()
    alive = [obj for obj in gc.get_objects() if type(obj) is torch.Tensor]
    return [tensor for tensor in alive if torch._C._functorch.is_batchedtensor(tensor)]


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.grad(lambda x: f(x).sum())], ids=["value", "grad"])
def test_function_that_stores_tensors_matches_its_rows(kind, transform):
    function, twin = MAKE[kind](), MAKE[kind]()
    f, of_twin = jtbridge.wrap(function), jtbridge.wrap(twin)
    before = tensors_of_batches()  # tensors that other tests keep
    for _ in range(3):
        found = jax.vmap(transform(f))(ROWS)
        np.testing.assert_allclose(found, [transform(of_twin)(row) for row in ROWS], rtol=1e-6)
        assert len(tensors_of_batches()) == len(before)
    tensor = torch.tensor([1.0, 2.0, 3.0])
    np.testing.assert_allclose(function(tensor).detach(), twin(tensor).detach(), rtol=1e-6)


def test_rebuilt_mask():
    """The previous call kept nothing. The state of this call is still saved, because the first call kept a tensor."""
    module = Masked()
    f = jtbridge.wrap(module)
    for _ in range(3):
        module.mask = None
        for _ in range(2):
            np.testing.assert_allclose(jax.vmap(f)(ROWS), ROWS * jnp.arange(1.0, 4.0))
        assert module.mask.tolist() == [1.0, 2.0, 3.0]


def test_tensor_first_stored_by_a_later_call_is_named():
    kept, keeps = {}, []

    def f(x):
        if keeps:
            kept["last"] = x * 2
        return x + 1

    g = jax.vmap(jtbridge.wrap(f))
    for _ in range(2):
        g(ROWS)
    keeps.append(True)
    with pytest.raises(MutationError, match=r'stored a tensor of the batch in .*kept\["last"\].*Put the state back'):
        g(ROWS)
    kept.clear()
    np.testing.assert_allclose(g(ROWS), ROWS + 1)
    assert kept["last"].tolist() == (2 * ROWS[1]).tolist()


@pytest.mark.filterwarnings("error::jtbridge.errors.SequentialVmapWarning")
def test_reference_cycles_do_not_count_as_stored():
    def f(x):
        circle: list[Any] = [x * 2]
        circle.append(circle)
        return circle[0] + 1

    np.testing.assert_allclose(jax.vmap(jtbridge.wrap(f))(ROWS), 2 * ROWS + 1)


def test_warning_gives_the_reason():
    with pytest.warns(SequentialVmapWarning, match="keeps a tensor of the batch, which belongs to no row"):
        jax.vmap(jtbridge.wrap(Masked()))(ROWS)


def test_rows_of_different_sizes_are_refused_by_name():
    f = jtbridge.wrap(lambda x: torch.bincount(x.long()))
    with pytest.raises(
        DataDependentShapeError, match=r"Result 0 of .* \(4,\) for row 0 of the batch, and \(7,\) for row 1"
    ):
        jax.vmap(f)(ROWS)
    f = jtbridge.wrap(lambda x: [x] * int(x[0]))
    with pytest.raises(OutputMismatchError, match="returns 1 arrays for row 0 of the batch, and another number"):
        jax.vmap(f)(ROWS)
