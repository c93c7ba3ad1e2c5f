"""Results: trees of any containers, Python values, and results that share memory."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import ArgumentError, OutputMismatchError

from .compare import assert_matches

X = jnp.array([[1.0, 5.0], [3.0, 2.0]])
T = torch.tensor([[1.0, 5.0], [3.0, 2.0]])
Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Prediction:
    mean: Any
    deviation: Any
    name: str = "normal"


@dataclasses.dataclass(frozen=True)
class Checked:
    """A container whose constructor accepts only a matrix."""

    value: Any

    def __post_init__(self):
        if self.value.ndim != 2:
            raise ValueError("not a matrix")


@pytest.fixture(scope="module")
def bert() -> torch.nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return BertModel(config).eval()


@pytest.mark.parametrize("jit", [False, True])
def test_hugging_face_output(bert: torch.nn.Module, jit: bool, backend: str):
    from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions as Output

    ids, mask = np.array([[1, 2, 3, 4], [5, 6, 0, 0]]), np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
    f = jtbridge.wrap(bert)
    run = jax.jit(lambda ids, mask: f(input_ids=ids, attention_mask=mask)) if jit else f
    found = run(jnp.asarray(ids), jnp.asarray(mask))
    with torch.no_grad():
        expected = bert(torch.from_numpy(ids), torch.from_numpy(mask))
    assert type(found) is type(expected) is Output
    assert list(found.keys()) == list(expected.keys())
    assert_matches(found.last_hidden_state, expected.last_hidden_state)
    assert_matches(found["pooler_output"], expected["pooler_output"])
    assert found.attentions is None


def test_gradient_through_a_hugging_face_model(bert: torch.nn.Module, backend: str):
    ids = np.array([[1, 2, 3, 4]])
    parameters = dict(bert.named_parameters())
    f = jtbridge.wrap(lambda p, ids: torch.func.functional_call(bert, p, (ids,)))
    gradient = jax.jit(jax.grad(lambda p, ids: (f(p, ids).last_hidden_state ** 2).sum()))
    found = gradient(jtbridge.to_jax(parameters), jnp.asarray(ids))
    loss = (bert(torch.from_numpy(ids)).last_hidden_state ** 2).sum()
    expected = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
    assert_matches(found, dict(zip(parameters, expected, strict=True)), tolerance=1e-4)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: Pair(x + 1, {"b": x.sum(), "a": [x * 2, ()]}),
        lambda x: collections.OrderedDict(z=x + 1, a=x.sum()),
        lambda x: (x, None, [None, {"n": None}]),
        lambda x: [x.sum(0), (x.sum(1),)],
        lambda x: None,
        lambda x: (x.shape[0], x.shape, "name", 2.5, True, x.dtype, x.device, len(x) > 1),
        lambda x: {3: x, 1: x.sum()},
    ],
)
def test_containers(fn: Any, jit: bool, backend: str):
    f = jtbridge.wrap(fn)
    if jit:  # a compiled program returns arrays only
        arrays = jax.jit(lambda x: [leaf for leaf in jax.tree.leaves(f(x)) if isinstance(leaf, jax.Array)])
        tensors = [leaf for leaf in jax.tree.leaves(fn(T)) if isinstance(leaf, torch.Tensor)]
        assert_matches(arrays(X), tensors)
    else:
        assert_matches(f(X), fn(T))


def test_dataclass(backend: str):
    f = jtbridge.wrap(lambda x: Prediction(x.mean(0), x.std(0)))
    found = f(X)
    assert type(found) is Prediction
    assert found.name == "normal"
    assert_matches(found.mean, T.mean(0))
    assert_matches(jax.jit(lambda x: f(x).deviation)(X), T.std(0))
    assert_matches(jax.grad(lambda x: f(x).mean.sum())(X), torch.full((2, 2), 0.5))
    assert_matches(jax.vmap(lambda x: f(x[:, None]).mean)(X), T.mean(1, keepdim=True))


def test_frozen_dataclass_that_checks_itself(backend: str):
    f = jtbridge.wrap(lambda x: Checked(x * 2))
    assert_matches(f(X).value, T * 2)
    assert_matches(jax.jit(f)(X).value, T * 2)


@pytest.mark.parametrize("jit", [False, True])
def test_torch_return_types(jit: bool, backend: str):
    f = jtbridge.wrap(lambda x: torch.max(x, dim=1))
    found = (jax.jit(f) if jit else f)(X)
    assert type(found) is torch.return_types.max
    assert_matches(found.values, torch.tensor([5.0, 3.0]))
    assert_matches(found.indices, torch.tensor([1, 0]))
    assert_matches(jax.grad(lambda x: f(x).values.sum())(X), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))


def test_python_values_are_per_shape(backend: str):
    f = jtbridge.wrap(lambda x: (x.numel(), float(x.shape[0]), f"{x.ndim}d"))
    for x, expected in ((X, (4, 2.0, "2d")), (X[0], (2, 2.0, "1d"))):
        assert_matches(f(x), expected)


@pytest.mark.parametrize("jit", [False, True])
def test_numpy_results(jit: bool, backend: str):
    f = jtbridge.wrap(lambda x: {"a": x.numpy() * 2, "b": np.float32(1.5), "c": np.arange(3)})
    found = (jax.jit(f) if jit else f)(X)
    assert_matches(found, {"a": T * 2, "b": torch.tensor(1.5), "c": torch.arange(3)})


@pytest.mark.parametrize("jit", [False, True])
def test_results_that_share_memory(jit: bool, backend: str):
    """They share memory with the argument, with each other and through views, but each becomes a separate array."""
    weight = torch.ones(2, requires_grad=True)

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        y = x + 1
        return [
            x,
            x,
            x.t(),
            x[1:],
            x.expand(3, 2, 2),
            y,
            y,
            y.view(-1)[::2],
            y.flip(0),
            y.real,
            weight,
            weight.detach(),
        ]

    f = jtbridge.wrap(fn)
    found = (jax.jit(f) if jit else f)(X)
    expected = [y.detach().clone() for y in fn(T)]
    pointers = {y.unsafe_buffer_pointer() for y in found}
    assert X.unsafe_buffer_pointer() not in pointers
    assert weight.data_ptr() not in pointers
    assert jit or len(pointers) == len(found)
    with torch.no_grad():
        weight.zero_()
    assert_matches(found, expected)


@pytest.mark.parametrize("size", [4, 40_000])
def test_results_in_memory_not_owned_by_torch(size: int):
    owner = np.zeros(size, np.float32)
    array = jtbridge.wrap(lambda x: torch.from_numpy(owner))(jnp.ones(1))
    owner[:] = 7
    assert not array.any()


def test_conjugate_transposed_and_empty_results(backend: str):
    f = jtbridge.wrap(
        lambda x: [x.T, x.to(torch.complex64).conj(), (x * 1j).conj().imag, x[:0], x.sum(), x.new_zeros(0, 3)]
    )
    expected = [T.T, T.to(torch.complex64), -T, T[:0], T.sum(), torch.zeros(0, 3)]
    assert_matches(f(X), expected)
    assert_matches(jax.jit(f)(X), expected)


def test_results_are_as_committed_to_a_device_as_the_arguments(backend: str):
    """A result is committed to a device if an argument is; an uncommitted array fits into any program."""
    f, device = jtbridge.wrap(torch.sin), jax.devices()[1]
    for run in (f, jax.jit(f)):
        assert run(X).committed == X.committed is False
        found = run(jax.device_put(X, device))
        assert found.committed
        assert found.devices() == {device}


@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")  # JAX's, of iterators
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    "result",
    [
        lambda x: (t for t in [x]),
        lambda x: [x, map(torch.sin, [x])],
        lambda x: {x},
        lambda x: frozenset([2 * x]),
        lambda x: {"a": x}.values(),
        lambda x: {"a": x}.items(),
        lambda x: iter([x]),
    ],
)
def test_results_with_hidden_tensors_are_refused(result, jit: bool):
    f = jtbridge.wrap(result)
    with pytest.raises(ArgumentError, match=r"returned an? .*, whose tensors JAX cannot find. Return a list"):
        (jax.jit(f) if jit else f)(jnp.ones(2))
    with pytest.raises(ArgumentError, match="cannot find"):
        jax.vjp(f, jnp.ones(2))


def test_arrays_of_jax_among_results():
    made = jtbridge.wrap(lambda x: (2 * x, jnp.ones(2)))
    np.testing.assert_array_equal(made(X)[1], jnp.ones(2))
    with pytest.raises(OutputMismatchError, match="returned an array that it made with JAX while JAX traced it"):
        jax.jit(made)(X)

    def from_outside(x, y):
        return jtbridge.wrap(lambda x: (2 * x, y))(x)

    for run in (from_outside, jax.jit(from_outside), jax.vmap(from_outside)):
        np.testing.assert_array_equal(run(X, 3 * X)[1], 3 * X)
    for run in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        np.testing.assert_array_equal(run(lambda y: from_outside(X, y)[1].sum())(X), jnp.ones_like(X))


def test_a_size_is_a_tuple_in_a_trace():
    f = jtbridge.wrap(lambda x: {"double": x * 2, "shape": x.shape})
    out = jax.jit(f)(jnp.ones((2, 3)))
    assert type(out["shape"]) is tuple
    assert tuple(map(int, out["shape"])) == (2, 3)
    assert jax.eval_shape(f, jnp.ones((2, 3)))["double"].shape == (2, 3)
    assert type(f(jnp.ones((2, 3)))["shape"]) is torch.Size


@pytest.mark.parametrize("program", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack"])
def test_packed_sequences(program: Callable, backend: str):
    lengths = (3, 5)
    rows = [jnp.arange(2.0 * n).reshape(n, 2) for n in lengths]

    def pack(*rows: torch.Tensor) -> Any:
        return torch.nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)

    expected = pack(*map(jtbridge.to_torch, rows))
    got = program(jtbridge.wrap(pack, backend=backend))(*rows)
    assert type(got) is type(expected)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    padded, counts = jtbridge.wrap(torch.nn.utils.rnn.pad_packed_sequence)(got)
    assert (padded.shape, counts.tolist()) == ((5, 2, 2), [3, 5])
    slope = program(jax.grad(lambda row: (jtbridge.wrap(pack, backend=backend)(row, rows[1]).data ** 2).sum()))(rows[0])
    np.testing.assert_allclose(slope, 2 * rows[0])


def test_object_with_tensors_that_jax_does_not_know():
    f = jtbridge.wrap(lambda x: torch.distributions.Normal(x, 1.0))
    assert isinstance(f(jnp.ones(3)), torch.distributions.Normal)
    with pytest.raises(OutputMismatchError, match="of the type `Normal`, which JAX does not know"):
        jax.jit(lambda x: f(x).loc)(jnp.ones(3))
