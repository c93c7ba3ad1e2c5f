"""Functions that close over CUDA tensors, on a machine without a GPU: tests declare which tensors are CUDA tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.capture import GraphUse, _strategies, _trace
from jtbridge.capture.modes import closed_over
from jtbridge.core.array_types import ArrayType
from jtbridge.errors import TranslationError

X = jnp.asarray(np.random.default_rng(0).standard_normal((5, 40)), jnp.float32)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Return the tensors that count as CUDA tensors."""
    tensors: list[torch.Tensor] = []
    monkeypatch.setattr(closed_over, "on_gpu", lambda tensor: any(tensor is other for other in tensors))
    monkeypatch.setattr(_trace, "may_be_on_gpu", lambda: True)
    monkeypatch.setattr(_strategies, "may_be_on_gpu", lambda: True)
    return tensors


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.LayerNorm(40), torch.nn.GELU(), torch.nn.Linear(40, 3))


def in_torch(module: torch.nn.Module) -> tuple[np.ndarray, np.ndarray]:
    """Return the value, and the gradient of its sum."""
    x = torch.tensor(np.asarray(X), requires_grad=True)
    y = module(x)
    return y.detach().numpy(), torch.autograd.grad(y.sum(), x)[0].numpy()


def test_a_module_on_a_gpu_is_translated(there: list[torch.Tensor]):
    module = model()
    there += module.parameters()
    f = jtbridge.wrap(module, backend="xla")
    value, grad = in_torch(module)
    np.testing.assert_allclose(f(X), value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(X), grad, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(f)(X[:, None])[:, 0], value, rtol=1e-5, atol=1e-6)
    hessian = jax.jit(jax.hessian(lambda x: f(x[None])[0, 0]))(X[0])
    want = torch.autograd.functional.hessian(lambda x: module(x[None])[0, 0], torch.tensor(np.asarray(X[0])))
    np.testing.assert_allclose(hessian, want.numpy(), rtol=1e-4, atol=1e-6)  # type: ignore[union-attr]


def test_weights_on_a_gpu_are_read_again(there: list[torch.Tensor]):
    module = model()
    there += module.parameters()
    f = jtbridge.wrap(module, backend="xla")
    (call,) = jax.make_jaxpr(f)(X).jaxpr.eqns
    assert [x.aval.shape for x in call.invars] == [(5, 40), (40, 40)]  # the small ones are literals
    with torch.no_grad():
        module[0].weight.mul_(2)  # type: ignore[operator]
        module[3].bias.add_(1)  # type: ignore[operator]
    np.testing.assert_allclose(f(X), in_torch(module)[0], rtol=1e-5, atol=1e-6)


def test_weights_that_are_differentiated_inside(there: list[torch.Tensor]):
    weight = torch.linspace(1.0, 2.0, 40, requires_grad=True)
    there.append(weight)

    def by_weight(x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad((torch.sin(x) * weight**2).sum(), weight)
        return grad

    f = jtbridge.wrap(by_weight, backend="xla")
    want = 2 * np.linspace(1, 2, 40) * np.sin(np.asarray(X)).sum(0)
    np.testing.assert_allclose(f(X), want, rtol=1e-5)


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("detached", [False, True])
def test_storage_offset_of_a_view_is_kept(there: list[torch.Tensor], detached: bool, start: int):
    """Kernels and `as_strided` reach the memory of a tensor by its storage offset."""
    weights = torch.arange(200.0).reshape(5, 40)
    last = weights[start // 3 :, start:37]
    last = last.detach() if detached else last
    there.append(last)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        row = last.as_strided((4,), (40,), last.storage_offset())
        first = last.as_strided((4,), (1,), 0)
        behind = last.as_strided((2,), (1,), 198)
        return x[: len(last), start:37] + last, row, first, last.as_strided((2,), (1,)), last.sum(0), behind

    f = jtbridge.wrap(fn, backend="xla")
    for _ in range(2):
        rest = last[:4, 0], weights[0, :4], last[0, :2], last.sum(0), weights[4, 38:]
        want = (X[: len(last), start:37] + last.numpy(), *rest)
        for g, w in zip(jax.jit(lambda x: f(x))(X), want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-6)
        weights.mul_(2)  # the next trace reads it


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.to("cuda") * 2,
        lambda x: x.to("cuda:0", torch.float32) * 2,
        lambda x: x.cuda().to(device="cuda") * 2,
        lambda x: x.to(torch.device("cuda", 0)) * 2,
        lambda x: x + x.to(x.device) + torch.zeros(3, device="cuda"),
        lambda x: x * torch.tensor([2.0, 2.0, 2.0], device="cuda:0"),
        lambda x: torch.arange(3, device=torch.device("cuda")) * 0 + 2 * x,
    ],
)
def test_gpu_requests_use_the_cpu(there: list[torch.Tensor], fn: Any):
    module = _trace.trace(lambda x: [fn(x)], [ArrayType((3,), np.dtype(np.float32))], GraphUse.TRANSLATE)
    (result,) = module(torch.tensor([1.0, 2.0, 3.0]))
    assert result.device.type == "cpu"
    assert result.tolist() == [2, 4, 6]


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_tensors_made_on_a_gpu_by_name(there: list[torch.Tensor], device: str):
    """The argument is then a GPU tensor too, and new tensors without a device go to the GPU."""
    f = jtbridge.wrap(lambda x: x * torch.full((3,), 2.0, device=device) + torch.zeros(3), backend="xla")
    assert f(jnp.arange(3.0)).tolist() == [0, 2, 4]


def test_gpu_tensors_by_name_without_a_gpu_raise():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    f = jtbridge.wrap(lambda x: x * torch.full((3,), 2.0, device="cuda"), backend="xla")
    with pytest.raises(Exception, match=r"[Cc][Uu][Dd][Aa]|NVIDIA"):
        f(jnp.arange(3.0))


def test_gpu_autocast_differs_from_cpu_autocast(there: list[torch.Tensor]):
    weight = torch.ones(40, 3)
    there.append(weight)

    def half(x: torch.Tensor) -> torch.Tensor:
        torch.set_autocast_enabled("cuda", True)  # `torch.autocast` leaves it where there is no GPU
        try:
            return (x @ weight).float()
        finally:
            torch.set_autocast_enabled("cuda", False)

    with pytest.raises(TranslationError, match="autocast for CUDA"):
        jtbridge.wrap(half, backend="xla")(X)


def test_a_mask_on_a_gpu_is_known(there: list[torch.Tensor]):
    mask = torch.arange(40) % 3 == 0
    there.append(mask)
    f = jtbridge.wrap(lambda x: x[:, mask] * int(mask.sum()), backend="xla")
    np.testing.assert_array_equal(f(X), X[:, ::3] * 14)
    np.testing.assert_array_equal(
        jax.grad(lambda x: f(x).sum())(X), np.where(np.arange(40) % 3, 0, 14 * np.ones((5, 1)))
    )
    mask[1] = True
    want = X[:, np.asarray(mask)] * 15
    np.testing.assert_array_equal(jax.jit(lambda x: f(x))(X), want)
    f.clear_cache()
    np.testing.assert_array_equal(f(X), want)
