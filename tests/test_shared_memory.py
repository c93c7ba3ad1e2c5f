"""A caller's JAX array never changes, also by writes to its memory and by tensors that a function keeps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge


def _by_frombuffer(x: torch.Tensor) -> None:
    torch.frombuffer(memoryview(x.numpy()), dtype=torch.float32).add_(1)


# Ways to write to the memory of an argument without an operator on the argument.
BEHIND_TORCH = {
    "numpy": lambda x: x.numpy().fill(9),
    "detached_numpy": lambda x: x.detach().numpy().fill(9),
    "array": lambda x: np.asarray(x).fill(9),
    "bytes": lambda x: x.view(torch.uint8).numpy().fill(0),
    "buffer": _by_frombuffer,
    "data": lambda x: x.data.fill_(9),
    "storage": lambda x: x.untyped_storage().fill_(0),
    "set": lambda x: torch.tensor([]).set_(x.untyped_storage(), 0, (4,)).zero_(),
    "address": lambda x: ctypes.memset(x.data_ptr(), 0, 8),
    "from_dlpack": lambda x: torch.from_dlpack(x).add_(1),
    "dlpack_method": lambda x: torch.utils.dlpack.from_dlpack(x.__dlpack__()).add_(1),
    "to_dlpack": lambda x: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)).add_(1),
}


@pytest.mark.parametrize("name", BEHIND_TORCH)
def test_large_argument_is_not_overwritten(name: str):
    """An eager call shares the memory of a large argument with torch until it is written to."""

    def write(x):
        BEHIND_TORCH[name](x)
        return x.double().sum()

    x = jnp.ones(1 << 18)
    assert float(jtbridge.wrap(write)(x)) == float(write(torch.ones(1 << 18))) != 1 << 18
    assert float((x + 0).sum()) == 1 << 18


def test_to_dlpack_of_torch_is_unchanged():
    x = torch.arange(3.0)
    assert torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)).data_ptr() == x.data_ptr()


# References that a function may keep to a large result, and how they write to the memory of the result later.
KEPT_OF_A_RESULT = {
    "tensor": (lambda y: y, lambda kept: kept.mul_(7)),
    "view": (lambda y: y[3:], lambda kept: kept.mul_(7)),
    "detached": (lambda y: y.detach(), lambda kept: kept.mul_(7)),
    "numpy": (lambda y: y.numpy(), lambda kept: kept.fill(7)),
    "storage": (lambda y: y.untyped_storage(), lambda kept: kept.fill_(7)),
    "buffer": (lambda y: memoryview(y.numpy()), lambda kept: kept.__setitem__(0, 7.0)),
    "dlpack": (torch.from_dlpack, lambda kept: kept.mul_(7)),
    "closure": (lambda y: lambda: y, lambda kept: kept().mul_(7)),
}


@pytest.mark.parametrize("name", KEPT_OF_A_RESULT)
def test_a_large_result_does_not_change_after_the_call(name: str):
    """A large result shares its memory with the array only if the function kept no reference to the memory."""
    keep, write = KEPT_OF_A_RESULT[name]
    kept = []

    def f(x):
        y = x * 2
        kept.append(keep(y))
        return y

    y = jtbridge.wrap(f)(jnp.ones(1 << 18))
    write(kept.pop())
    assert float((y + 0).sum()) == 2 << 18


LARGE = 100_000  # elements: a small argument is copied before the call


def large() -> jax.Array:
    return jnp.arange(1.0, LARGE + 1)


EAGER_CALLS: dict[str, Callable[[Any, jax.Array], Any]] = {
    "call": lambda f, x: f(x),
    "grad": lambda f, x: jax.grad(f)(x),
    "vjp": lambda f, x: jax.vjp(f, x)[0],
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: jax.vmap(f)(x[None])[0],
    "grad of grad": lambda f, x: jax.grad(lambda x: jax.grad(f)(x).sum())(x),
}


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("call", EAGER_CALLS)
@pytest.mark.parametrize(
    "keep", [lambda x: x.detach(), lambda x: x.detach()[1:], lambda x: x], ids=["detached", "part", "itself"]
)
def test_stored_argument_does_not_share_memory_with_the_array(keep: Callable, call: str):
    kept = []

    def f(x):
        kept.append(keep(x))
        return (x**2).sum()

    x = large()
    EAGER_CALLS[call](jtbridge.wrap(f), x)
    with torch.no_grad():
        kept[0].zero_()
    assert x.tolist() == list(range(1, LARGE + 1))


def test_a_large_argument_is_copied_under_a_mode_of_torch():
    x = large()
    with torch.device("meta"):
        assert jtbridge.wrap(lambda x: x.mul_(2))(x)[:2].tolist() == [2, 4]
    assert x[:2].tolist() == [1, 2]


def test_an_average_of_arguments_that_a_later_call_writes_to():
    class Average:
        def __init__(self) -> None:
            self.value: Any = None

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.value = x.detach() if self.value is None else self.value.mul_(0.5).add_(x.detach(), alpha=0.5)
            return (x * self.value).sum()

    f = jtbridge.wrap(Average())
    x, y = large(), 3 * large()
    _, pullback = jax.vjp(f, x)  # the graph of the first call exists during the second
    assert float(jax.vjp(f, y)[0]) == pytest.approx(float((y * (x + y) / 2).sum()))
    assert x[:2].tolist() == [1, 2]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # torch's own, as without jtbridge
        pullback(jnp.ones(()))


class _WritesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x**2).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * x.mul_(2)


def _writes_in_a_hook(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.register_hook(lambda grad: grad + x.data.zero_())
    return (y**2).sum()


def _writes_in_a_hook_of_a_node(x: torch.Tensor) -> torch.Tensor:
    y = (x * 1) ** 2
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda grads: (grads[0] + x.data.zero_(),))
    return y.sum()


@pytest.mark.parametrize("function", [_WritesInBackward.apply, _writes_in_a_hook, _writes_in_a_hook_of_a_node])
def test_a_backward_that_writes_to_an_argument(function: Callable):
    x = large()
    grad = jax.grad(jtbridge.wrap(function))(x)
    assert grad[:2].tolist() == [2, 4]
    assert x[:2].tolist() == [1, 2]
