"""Code that reads values is translated where the values depend on constants alone, and only there."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge import errors
from jtbridge.capture.modes import constant_eval

X = np.arange(6, dtype=np.float32).reshape(2, 3) - 2
MASK = torch.tensor([[True, False, True], [False, True, True]])
SIZES = torch.tensor([2, 3])


def number_of_closed_over(x):
    return x.reshape(int(torch.prod(SIZES))) * SIZES.sum().item()


def number_of_literal(x):
    return torch.stack([part.sum() for part in x.flatten()[:5].split(torch.tensor([2, 3]).tolist())])


def mask_closed_over(x):
    return x[MASK]


def mask_of_rows(x):
    return x[MASK[:, 0]].sum(0)


def mask_beside_index(x):
    return x[MASK[:, 0], torch.tensor([2])]


def mask_of_factory(x):
    return x[torch.triu(torch.ones(2, 3)).bool()]


def selected(x):
    return x.masked_select(MASK[0]) + x.masked_select(MASK)[:4]


def positions(x):
    i, j = torch.where(MASK)
    steps = torch.nonzero(MASK)
    steps += 1
    return x[i, j] * int(steps.sum())


def distinct(x):
    values, counts = torch.unique(SIZES.repeat(2), return_counts=True)
    return values + counts * x.sum()


def repeated(x):
    return x.repeat_interleave(SIZES, 0)


def put_back(x):
    y = torch.zeros(2, 3)
    y[MASK] = x[MASK] * 3
    return y


def put_beside_index(x):
    y = x.clone()
    y[MASK[:, 1], torch.tensor([2])] = 7.0
    return y


def in_batches(x):
    return torch.func.vmap(lambda row: row[MASK[0]])(x)


def branch(x):
    return x.sin() if SIZES.sum() > 4 and torch.arange(3).sum() == 3 else x


def written_by_elements(x):
    n = torch.zeros(6, dtype=torch.bool)
    n[[1, 4]] = True
    return x.flatten()[n]


def written_by_views(x):
    n = torch.zeros(2, 3)
    row = n[0]
    before = row + 1
    row.fill_(2)
    n[1, 1] = 5
    return x[n > 0] * before.sum().item() * int(row.sum())


def written_in_turn(x):
    n = torch.arange(6)
    n.add_(1).mul_(2)
    copied = n.clone()
    n.sub_(n.sum())
    return x.flatten()[copied > 4] * int(n.sum())


def written_transposed(x):
    n = torch.zeros(2, 3)
    n.t()[2, 0] = 4.0
    return x * int(n[0, 2])


def written_after_it_was_read(x):
    n = torch.zeros(3)
    more = n + 1
    n.copy_(x[0])
    return x * int(more.sum()) + n


TRANSLATED = [
    number_of_closed_over,
    number_of_literal,
    mask_closed_over,
    mask_of_rows,
    mask_beside_index,
    mask_of_factory,
    selected,
    positions,
    distinct,
    repeated,
    put_back,
    put_beside_index,
    in_batches,
    branch,
    written_by_elements,
    written_by_views,
    written_in_turn,
    written_transposed,
    written_after_it_was_read,
]


def of_torch(f, x):
    tensor = torch.tensor(x, requires_grad=True)
    result = f(tensor)
    (gradient,) = torch.autograd.grad(torch.sin(result).sum(), tensor)
    return result.detach().numpy(), gradient.numpy()


@pytest.mark.parametrize("f", TRANSLATED)
def test_values_gradients_and_batches(f):
    wrapped = jtbridge.wrap(f)
    explained = jtbridge.explain(wrapped, X)
    assert (explained.backend, explained.gradient) == ("xla", "xla")

    def loss(x):
        return jnp.sin(wrapped(x)).sum()

    want, gradient = of_torch(f, X)
    got = jax.jit(wrapped)(X)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(X), gradient, rtol=1e-5)
    rows = np.stack([X, 2 * X + 1])
    values, gradients = zip(*(of_torch(f, row) for row in rows), strict=True)
    np.testing.assert_allclose(jax.jit(jax.vmap(wrapped))(rows), values, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(loss)))(rows), gradients, rtol=1e-5)
    np.testing.assert_allclose(wrapped(X), want, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(loss)(X), gradient, rtol=1e-5)
    with warnings.catch_warnings():
        # An eager call uses torch's vmap, which refuses to write a batch into an unbatched tensor.
        warnings.simplefilter("ignore", errors.SequentialVmapWarning)
        np.testing.assert_allclose(jax.vmap(wrapped)(rows), values, rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(jax.grad(loss))(rows), gradients, rtol=1e-5)


@pytest.mark.parametrize("f", TRANSLATED)
def test_called_functions_are_differentiated(f):
    wrapped = jtbridge.wrap(f, backend="dlpack")
    want, gradient = of_torch(f, X)
    np.testing.assert_allclose(jax.jit(wrapped)(X), want, rtol=1e-6)
    for transformed in (jax.grad, lambda loss: jax.jit(jax.grad(loss))):
        got = transformed(lambda x: jnp.sin(wrapped(x)).sum())(X)
        np.testing.assert_allclose(got, gradient, rtol=1e-5)


def of_its_argument(x):
    return x[x > 0]


def of_a_written_tensor(x):
    n = torch.zeros(2, 3)
    n[0] = x[0]
    return x[n > 0]


def of_a_view_of_a_written_tensor(x):
    n = torch.zeros(2, 3)
    row = n[0]
    n.copy_(x)
    return x[:, row > 0]


@pytest.mark.parametrize("f", [of_its_argument, of_a_written_tensor, of_a_view_of_a_written_tensor])
def test_a_shape_that_depends_on_arguments_is_refused_under_a_trace(f):
    wrapped = jtbridge.wrap(f)
    with pytest.raises(errors.DataDependentShapeError, match=r"depends on the values of its arguments"):
        jax.jit(wrapped)(X)
    for x in (X, -X, X[:, ::-1].copy()):
        np.testing.assert_array_equal(wrapped(x), f(torch.tensor(x)))


def of_memory_without_values(x):
    return x * (1 + 0 * int((torch.empty(3) * 0).isnan().sum()))


def of_memory_seen_as_another_dtype(x):
    n = torch.zeros(4, dtype=torch.int32)
    n.view(torch.float32)[0] = 1.0
    return x * int(n.sum())


def of_written_and_filled(x):
    n = torch.zeros(3)
    n.copy_(x[0])
    n.fill_(2.0)
    return x * int(n.sum())


def branching_on_memory_seen_as_another_dtype(x):
    n = torch.zeros(4, dtype=torch.int32)
    n.view(torch.float32)[0] = 1.0
    return x * 2 if n.sum() > 0 else x


@pytest.mark.parametrize("jit", [True, False])
def test_branch_on_an_unknown_value_is_translated(jit):
    wrapped = jtbridge.wrap(branching_on_memory_seen_as_another_dtype, backend="xla")
    wrapped = jax.jit(wrapped) if jit else wrapped
    np.testing.assert_allclose(wrapped(X), 2 * np.asarray(X))


@pytest.mark.parametrize("f", [of_memory_without_values, of_memory_seen_as_another_dtype, of_written_and_filled])
@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
def test_functions_of_unknown_values_are_called(f):
    wrapped = jtbridge.wrap(f)
    assert jtbridge.explain(wrapped, X).backend == "dlpack"
    np.testing.assert_allclose(jax.jit(wrapped)(X), f(torch.tensor(X)))
    np.testing.assert_allclose(wrapped(X), f(torch.tensor(X)))


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
def test_large_written_memory_is_not_evaluated(monkeypatch):
    monkeypatch.setattr(constant_eval, "_MAX_TRACKED_BYTES", 4)
    with pytest.raises(errors.DataDependentShapeError):
        jax.jit(jtbridge.wrap(written_by_elements))(X)
    np.testing.assert_allclose(jtbridge.wrap(written_by_elements)(X), written_by_elements(torch.tensor(X)))
    wrapped = jtbridge.wrap(written_after_it_was_read)
    assert jtbridge.explain(wrapped, X).backend == "dlpack"
    np.testing.assert_allclose(jax.jit(wrapped)(X), written_after_it_was_read(torch.tensor(X)))


def fails_when_it_is_computed(x):
    return x * int(torch.arange(3).index_select(0, torch.tensor([7])).sum())


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
def test_failed_constant_evaluation_is_left_to_torch():
    wrapped = jtbridge.wrap(fails_when_it_is_computed)
    assert jtbridge.explain(wrapped, X).backend == "dlpack"
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"raised IndexError: index out of range in self"):
        jax.jit(wrapped)(X).block_until_ready()
    with pytest.raises(IndexError, match=r"index out of range in self"):  # torch's own error
        wrapped(X)


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_a_constant_that_is_written_to_is_read_again(backend):
    mask = torch.tensor([True, False, True])
    f = jtbridge.wrap(lambda x: x[:, mask] * int(mask.sum()), backend=backend)
    np.testing.assert_array_equal(f(X), X[:, [0, 2]] * 2)
    np.testing.assert_array_equal(jax.jit(lambda x: f(x))(X), X[:, [0, 2]] * 2)
    mask[1] = True
    np.testing.assert_array_equal(f(X), X * 3)
    np.testing.assert_array_equal(jax.jit(lambda x: f(x))(X), X * 3)
    with torch.inference_mode():
        other = torch.tensor([True, True, False])
    g = jtbridge.wrap(lambda x: x[:, other], backend=backend)
    np.testing.assert_array_equal(g(X), X[:, :2])
    with torch.inference_mode():
        other[:] = torch.tensor([False, False, True])
    np.testing.assert_array_equal(g(X), X[:, 2:])
    np.testing.assert_array_equal(jax.jit(lambda x: g(x))(X), X[:, 2:])


def test_a_buffer_of_a_module():
    class Chosen(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tensor([True, False, True]))
            self.linear = torch.nn.Linear(2, 2)

        def forward(self, x):
            return self.linear(x[:, self.mask])

    module = Chosen()
    f = jtbridge.wrap(module)
    assert jtbridge.explain(f, X).backend == "xla"
    for mask in ([True, False, True], [False, True, True]):
        module.mask = torch.tensor(mask)
        want = module(torch.tensor(X)).detach()
        np.testing.assert_allclose(f(X), want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(jax.jit(lambda x: f(x))(X), want, rtol=1e-5, atol=1e-6)
