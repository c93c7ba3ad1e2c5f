"""A caller's JAX array never changes, whatever the torch function does to its argument."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import jtbridge
from jtbridge.errors import MutationError

from .compare import assert_matches


def _data_write(x: torch.Tensor) -> torch.Tensor:
    x.data[0] = 9
    return x.sum()


def _slice_write(x: torch.Tensor) -> torch.Tensor:
    x[1:].mul_(2)
    return x * 1


def _view_write(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[::2].zero_()
    return x + 0


def _out_argument(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x, out=x)


def _opaque_write(x: torch.Tensor) -> torch.Tensor:
    if x.sum().item() > -1e9:
        x.add_(1)
    return x * 2


def _numpy_write(x: torch.Tensor) -> torch.Tensor:
    x.detach().numpy()[0] = 7
    return x * 2


def _returned_argument(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


WRITERS: dict[str, Callable[..., Any]] = {
    "in_place_operator": lambda x: x.mul_(3).sum(),
    "item_assignment": lambda x: x.__setitem__(0, 5.0),
    "slice": _slice_write,
    "view": _view_write,
    "data": _data_write,
    "out_argument": _out_argument,
    "returned": _returned_argument,
    "opaque": _opaque_write,
    "numpy": _numpy_write,
    "relu_in_place": lambda x: torch.nn.functional.relu(x, inplace=True),
    "fill": lambda x: x.fill_(0.0) + 1,
    "copy": lambda x: x.copy_(torch.zeros(3)),
    "transposed": lambda x: x.T.add_(1) if x.ndim > 1 else x.add_(1),
    "resized_loop": lambda x: [part.neg_() for part in x.unbind()],
}


@pytest.fixture(params=WRITERS)
def writer(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return WRITERS[request.param]


@pytest.fixture
def x() -> jax.Array:
    return jnp.array([1.0, -2.0, 3.0])


def expected(writer: Callable[..., Any]) -> Any:
    return writer(torch.tensor([1.0, -2.0, 3.0]))


@pytest.mark.parametrize("jit", [False, True])
def test_argument_is_unchanged(writer: Callable[..., Any], jit: bool, x: jax.Array, backend: str):
    f = jtbridge.wrap(writer)
    for _ in range(2):  # the second call sees the same argument as the first
        assert_matches((jax.jit(f) if jit else f)(x), expected(writer))
    assert x.tolist() == [1, -2, 3]


def test_intermediate_value_is_unchanged(writer: Callable[..., Any], x: jax.Array, backend: str):
    """The function writes to an intermediate value of a program, which the program uses again after the call."""
    f = jtbridge.wrap(writer)

    @jax.jit
    def run(x):
        y = jnp.negative(x)
        return y, f(y), y + 0

    before, _, after = run(-x)
    assert before.tolist() == after.tolist() == [1, -2, 3]


def test_numpy_and_torch_arguments_are_unchanged(writer: Callable[..., Any], backend: str):
    array, tensor = np.array([1, -2, 3], np.float32), torch.tensor([1.0, -2.0, 3.0])
    f = jtbridge.wrap(writer)
    assert_matches(f(array), expected(writer))
    assert_matches(f(tensor), expected(writer))
    assert array.tolist() == tensor.tolist() == [1, -2, 3]


@pytest.mark.parametrize("name", ["in_place_operator", "slice", "view", "returned", "opaque"])
def test_vmap(name: str, backend: str):
    rows = jnp.array([[1.0, -2.0, 3.0], [4.0, 5.0, 6.0]])
    f = jax.vmap(jtbridge.wrap(WRITERS[name]))
    with pytest.warns(jtbridge.errors.SequentialVmapWarning) if name == "opaque" else contextlib.nullcontext():
        out = jax.jit(f)(rows)
    assert_matches(out, torch.stack([WRITERS[name](torch.tensor(r.tolist())) for r in rows]))
    assert rows.tolist() == [[1, -2, 3], [4, 5, 6]]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", ["in_place_operator", "slice", "view", "returned", "opaque", "relu_in_place"])
def test_grad(name: str, jit: bool, x: jax.Array, backend: str):
    f = jtbridge.wrap(WRITERS[name])
    grad = jax.grad(lambda x: jnp.sum(f(x) ** 2))
    t = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    (wanted,) = torch.autograd.grad((WRITERS[name](t.clone()) ** 2).sum(), t)
    for _ in range(2):
        assert_matches((jax.jit(grad) if jit else grad)(x), wanted)
    assert x.tolist() == [1, -2, 3]


@pytest.mark.parametrize("jit", [False, True])
def test_return_mutated(jit: bool, backend: str):
    @jtbridge.wrap(return_mutated=True)
    def step(params, x, *, lr):
        params["w"].sub_(lr * x)
        return params["w"].sum(), params["b"] * 2

    params, x = {"w": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}, jnp.array([1.0, 1.0])
    run = (lambda p, x: step(p, x, lr=0.5)) if not jit else jax.jit(lambda p, x: step(p, x, lr=0.5))
    out, mutated = run(params, x)
    assert_matches(out, (torch.tensor(2.0), torch.tensor(6.0)))
    assert list(mutated) == ["params['w']"]
    assert mutated["params['w']"].tolist() == [0.5, 1.5]
    assert params["w"].tolist() == [1, 2]


STATISTICS: dict[str, Callable[..., Any]] = {
    "batch_norm": lambda x, mean, var: F.batch_norm(x, mean, var, training=True),
    "native_batch_norm": lambda x, mean, var: torch.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5)[0],
    "batch_norm_update_stats": lambda x, mean, var: torch.batch_norm_update_stats(x, mean, var, 0.1)[0],
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
def test_running_statistics_that_a_schema_does_not_declare_as_written(name: str, jit: bool, backend: str):
    f = jtbridge.wrap(STATISTICS[name], return_mutated=True)
    x, mean, var = jnp.array([[1.0, 2.0], [3.0, 8.0]]), jnp.zeros(2), jnp.ones(2)
    out, mutated = (jax.jit(f) if jit else f)(x, mean, var)
    theirs = torch.tensor(x.tolist()), torch.zeros(2), torch.ones(2)
    wanted = STATISTICS[name](*theirs)
    assert_matches((out, *mutated.values()), (wanted, *theirs[1:]))
    assert mean.tolist() == [0, 0]


def test_return_mutated_of_a_function_without_writes(backend: str):
    out, mutated = jtbridge.wrap(torch.sin, return_mutated=True)(jnp.zeros(2))
    assert out.tolist() == [0, 0]
    assert mutated == {}


def test_gradient_of_the_mutated_value(backend: str):
    f = jtbridge.wrap(lambda x: x.mul_(3).exp_().sum(), return_mutated=True)
    grad = jax.jit(jax.grad(lambda x: f(x)[1]["x"].sum()))
    assert_matches(grad(jnp.array([0.0, 0.5])), 3 * torch.tensor([0.0, 1.5]).exp())


def test_scan_over_a_function_that_writes(backend: str):
    f = jtbridge.wrap(lambda c: c.add_(1))
    start = jnp.zeros(2)
    last, seen = jax.jit(lambda c: jax.lax.scan(lambda c, _: (f(c), c), c, None, length=3))(start)
    assert last.tolist() == [3, 3]
    assert seen.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert start.tolist() == [0, 0]


def test_closed_over_tensor_is_refused_under_a_trace_and_unchanged(backend: str):
    count = torch.zeros(2)

    def f(x):
        count.add_(1)
        return x + count

    wrapped = jtbridge.wrap(f)
    with pytest.raises(MutationError) as caught:
        jax.jit(wrapped)(jnp.zeros(2))
    assert str(caught.value) == (
        "`f` writes to a closed-over tensor of shape (2,) and dtype torch.float32, which is not one of its "
        "arguments, and a JAX program has no state. Use `jtbridge.module(model)`, which returns the new values of a "
        "module's buffers; call `model.eval()` if it should not keep running statistics; pass the tensor as an "
        'argument and use `return_mutated=True`; or wrap with `effects="ordered"`.'
    )
    assert count.tolist() == [0, 0]
    for calls in (1, 2):
        assert wrapped(jnp.zeros(2)).tolist() == [calls, calls]  # eagerly it runs, as in torch
    assert count.tolist() == [2, 2]


def test_module_buffer_is_refused_by_name_until_eval(backend: str):
    norm = torch.nn.BatchNorm1d(2)
    f = jtbridge.wrap(norm)
    with pytest.raises(
        MutationError, match=r"`BatchNorm1d` writes to `BatchNorm1d\.(num_batches_tracked|running_mean)`"
    ):
        jax.jit(f)(jnp.ones((3, 2)))
    assert norm.num_batches_tracked.tolist() == 0
    assert norm.running_mean.tolist() == [0, 0]
    norm.eval()
    assert_matches(jax.jit(lambda x: f(x))(jnp.ones((3, 2))), norm(torch.ones(3, 2)).detach())


def test_module_buffers_as_arguments(backend: str):
    """This is the way that the message recommends: the state is an argument and a result."""
    norm = torch.nn.BatchNorm1d(2)
    state = jtbridge.to_jax({**dict(norm.named_parameters()), **dict(norm.named_buffers())})

    @jtbridge.wrap(return_mutated=True)
    def apply(state, x):
        return torch.func.functional_call(norm, state, (x,))

    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    out, mutated = jax.jit(apply)(state, x)
    assert norm.running_mean.tolist() == [0, 0]
    assert_matches(out, norm(torch.from_numpy(x)).detach(), tolerance=1e-5)
    assert_matches(mutated["state['running_mean']"], norm.running_mean)
    assert_matches(mutated["state['running_var']"], norm.running_var)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_a_write_by_numpy_to_an_argument_is_returned(backend: str):
    def f(x, y):
        x.detach().numpy()[0] = 7.0
        return x + y

    x, y = jnp.ones(2), jnp.ones(2)
    for call in (lambda f: f, jax.jit):
        out, mutated = call(jtbridge.wrap(f, backend=backend, return_mutated=True))(x, y)
        np.testing.assert_array_equal(out, [8.0, 2.0])
        assert list(mutated) == ["x"]
        np.testing.assert_array_equal(mutated["x"], [7.0, 1.0])
    np.testing.assert_array_equal(x, [1.0, 1.0])


def _with_other_data(x):
    x.data = torch.ones(3) * 5
    return x.sum()


def _with_an_axis(x):
    x.unsqueeze_(0).t_()
    x[0] = 1
    return (x**2).sum()


def _shorter(x):
    x.resize_(2)
    return x.sum()


def _with_other_memory(x):
    x.set_(torch.ones(3))
    return x.sum()


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning", "ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("by", ["auto", "dlpack"])
@pytest.mark.parametrize("fn", [_with_other_data, _with_an_axis, _shorter, _with_other_memory])
def test_an_argument_with_another_shape_or_memory(fn, by):
    rows = torch.arange(6.0).reshape(2, 3)
    written = [row.clone() for row in rows]
    values = [fn(row) for row in written]
    f = jtbridge.wrap(fn, backend=by, return_mutated=True)
    x = jnp.asarray(rows.numpy())
    for call in (f, jax.jit(f)):
        value, mutated = call(x[1])
        assert_matches((value, mutated["x"]), (values[1], written[1]))
    for call in (jax.vmap(f), jax.jit(jax.vmap(f))):
        value, mutated = call(x)
        assert_matches((value, mutated["x"]), (torch.stack(values), torch.stack(written)))


def test_value_dependent_shape_is_refused():
    def fn(x):
        x.resize_(2 if x.sum() > 1 else 1)
        return x.sum() * 0

    f = jax.jit(jtbridge.wrap(fn, backend="dlpack", return_mutated=True))
    with pytest.raises(Exception, match="left its argument `x` with the shape"):
        [np.asarray(f(v)[0]) for v in (jnp.zeros(3), jnp.ones(3))]


class CastsALayer(torch.nn.Module):
    def __init__(self, cast: Callable):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.cast = cast

    def forward(self, x):
        self.cast(self.layer)
        return self.layer(x)


CASTS = {
    "to": lambda layer: layer.to(torch.float32),
    "float": torch.nn.Module.float,
    "cpu": torch.nn.Module.cpu,
    "format": lambda layer: layer.to(memory_format=torch.channels_last),
}


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")  # torch cannot cast the layers of a trace
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_cast_of_a_layer_without_effect_is_not_a_write(cast: str, backend: str):
    model = CastsALayer(CASTS[cast])
    x = jnp.ones((4, 3))
    expected = model.layer(torch.ones(4, 3)).detach().numpy()
    f, net = jtbridge.wrap(model), jtbridge.module(model)
    params, state = net.init()
    gradient = jax.jit(jax.grad(lambda params: net(params, state, x)[0].sum()))
    with jtbridge.config(backend=backend):
        for program in (f, jax.jit(f), jax.jit(lambda x: net(params, state, x)[0])):
            np.testing.assert_allclose(program(x), expected, 1e-6)
        np.testing.assert_array_equal(gradient(params)["layer.bias"], [4.0, 4.0])


def test_a_cast_of_a_layer_that_changes_it_is_a_write():
    with pytest.raises(MutationError, match=r"writes to `Linear.weight`"):
        jax.jit(jtbridge.wrap(CastsALayer(torch.nn.Module.half)))(jnp.ones((4, 3)))
