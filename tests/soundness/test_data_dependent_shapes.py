"""Functions with inner sizes that depend on data: they run under jit unless the sizes of their results depend on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import jtbridge
from jtbridge.errors import DataDependentShapeError, OutputMismatchError, ShapeInferenceError

pytestmark = [
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning"),
]

V = np.array([1.0, -2.0, 3.0, 0.5], np.float32)
POINTS = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
CASES: list[tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = []


def case(*arguments: np.ndarray) -> Callable[[Callable], Callable]:
    """Register a function with its arguments."""

    def register(fn: Callable) -> Callable:
        CASES.append((fn, arguments))
        return fn

    return register


@case(V)
def nonzero_and_index_add(v):
    (where,) = torch.nonzero(v > 0, as_tuple=True)
    return torch.zeros_like(v).index_add(0, where, v[where] * 2)


@case(V)
def sum_of_a_mask(v):
    return v[v > 0.7].sum()


@case(V)
def mean_of_a_mask_times(v):
    return v[v > 0.7].mean() * v


@case(np.array([1.0, 2.0, 2.0, 3.0], np.float32))
def times_the_number_of_values(v):
    return v * torch.unique(v).numel()


@case(POINTS, POINTS[:, :2] + 1)
def least_squares(a, b):
    return torch.linalg.lstsq(a, b).solution


@case(np.random.default_rng(1).normal(size=(2, 4, 3)).astype(np.float32), np.array([4, 2]))
def packed_and_padded(x, lengths):
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(packed, batch_first=True, total_length=4)[0] ** 2


torch.manual_seed(0)
GRU = torch.nn.GRU(3, 5, batch_first=True)
LINEAR = torch.nn.Linear(3, 3)


@case(np.random.default_rng(1).normal(size=(2, 4, 3)).astype(np.float32), np.array([2, 4]))
def recurrent_of_packed(x, lengths):
    return GRU(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1]


@case(V, np.array([1, 0, 2, 1]))
def repeated(v, repeats):
    return (torch.repeat_interleave(v, repeats) ** 2).sum()


@case(V)
def masked_select(v):
    return torch.masked_select(v, v > 0).exp().sum()


@case(V, np.array([0, 1, 1, 3]))
def bincount(v, i):
    return torch.bincount(i).max() * v


@case(POINTS, np.array([[0, 1, 2, 2, 3], [1, 1, 0, 3, 3]]))
def graph_attention(x, edges):
    edges = edges[:, edges[0] != edges[1]]  # self loops are removed, and one is added to each node
    edges = torch.cat([edges, torch.arange(len(x)).expand(2, -1)], 1)
    source, target = edges
    h = LINEAR(x)
    score = F.leaky_relu((h[source] * h[target]).sum(-1)).exp()
    total = torch.zeros(len(x)).index_add(0, target, score)
    return torch.zeros_like(h).index_add(0, target, (score / total[target])[:, None] * h[source])


@case(POINTS, np.array([0, 1, 0, 1]))
def triplet_loss(x, labels):
    distance = torch.cdist(x, x)
    same = labels[:, None] == labels
    anchor, positive = torch.where(same & ~torch.eye(4, dtype=torch.bool))
    other, negative = torch.where(~same)
    i, j = torch.where(anchor[:, None] == other)
    loss = F.relu(distance[anchor[i], positive[i]] - distance[other[j], negative[j]] + 1)
    loss = loss[loss > 0]
    return loss.mean() if loss.numel() else x.sum() * 0


@case(POINTS)
def mixture_of_experts(x):
    weights, chosen = torch.softmax(x[:, :2], -1).topk(1, -1)
    mask = F.one_hot(chosen, 2).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for expert in torch.greater(mask.sum((-1, -2)), 0).nonzero():
        k, row = torch.where(mask[expert.squeeze()])
        out.index_add_(0, row, torch.tanh(x[row] * (expert + 2)) * weights[row, k, None])
    return out


@case(V)
def written_through_a_mask(v):
    out = torch.zeros_like(v)
    out[v > 0] = v[v > 0] * 3
    return out


@case(V)
def a_branch_on_a_size(v):
    positive = v[v > 0]
    return positive.sum() * v if positive.numel() > 2 else v * 3


@case(V)
def a_loop_over_values(v):
    out = torch.zeros_like(v)
    for value in torch.unique(v > 0):
        out = out + v * (value.float() + 1)
    return out


@case(V)
def split_at_a_number(v):
    n = int((v > 0).sum())
    left, right = v.split([n, len(v) - n])
    return left.sum() - right.sum()


@case(V)
def an_assertion_of_a_size(v):
    positive = v[v > 0]
    assert positive.numel() > 0
    torch._check(positive.numel() < 100)
    return positive.sum() * v


@case(V)
def an_asserted_tensor(v):
    torch._assert((v.abs() < 10).all(), "too large")
    return v[v > 0].sum() * v


@case(V)
def a_check_that_raises(v):
    if (v > 10).any():
        raise ValueError("too large")
    return v[v > 0].sum() * v


@case(V)
def a_size_that_a_check_tells(v):
    found = v[v.abs() > 0.1]
    torch._check(found.numel() == 4)
    return found * 2


@case(V)
def through_numpy(v):
    return v * len(np.flatnonzero(v.detach().numpy() > 0))


def tensors(arguments):
    return [torch.from_numpy(x.copy()) for x in arguments]


def arrays(arguments):
    return [jnp.asarray(x) for x in arguments]


def loss(out, like=jnp):
    weights = like.linspace(1.0, 2.0, out.size if like is jnp else out.numel())
    return (out.reshape(-1) * weights).sum()


def floats(arguments):
    return tuple(i for i, x in enumerate(arguments) if x.dtype.kind == "f")


def gradients(fn, arguments):
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in tensors(arguments)]
    return torch.autograd.grad(loss(fn(*inputs), torch), [inputs[i] for i in floats(arguments)])


each_case = pytest.mark.parametrize(("fn", "arguments"), CASES, ids=[fn.__name__ for fn, _ in CASES])


@each_case
@pytest.mark.parametrize("backend", ["auto", "dlpack", "callback"])
def test_value(fn, arguments, backend):
    f = jtbridge.wrap(fn, backend=backend)
    wanted = fn(*tensors(arguments)).detach()
    got = jax.jit(f)(*arrays(arguments))
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@each_case
def test_gradient(fn, arguments):
    f = jtbridge.wrap(fn)
    got = jax.jit(jax.grad(lambda *xs: loss(f(*xs)), argnums=floats(arguments)))(*arrays(arguments))
    wanted = gradients(fn, arguments)
    assert any(bool(w.any()) for w in wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@each_case
def test_vmap_and_gradient_of_vmap(fn, arguments):
    f = jtbridge.wrap(fn)
    rows = [arguments, tuple(x * np.float32(0.9) if x.dtype.kind == "f" else x for x in arguments)]
    columns = [jnp.stack([jnp.asarray(x) for x in column]) for column in zip(*rows, strict=True)]
    wanted = torch.stack([fn(*tensors(row)).detach() for row in rows])
    np.testing.assert_allclose(jax.jit(jax.vmap(f))(*columns), wanted, rtol=1e-5, atol=1e-6)
    slope = jax.grad(lambda *xs: jax.vmap(lambda *row: loss(f(*row)))(*xs).sum(), argnums=floats(arguments))
    for ours, *theirs in zip(jax.jit(slope)(*columns), *(gradients(fn, row) for row in rows), strict=True):
        np.testing.assert_allclose(ours, torch.stack(theirs), rtol=1e-4, atol=1e-5)


@each_case
def test_forward_mode_agrees_with_the_gradient(fn, arguments):
    f = jtbridge.wrap(fn)
    moving = floats(arguments)

    def of_moving(*xs):
        whole = arrays(arguments)
        for i, x in zip(moving, xs, strict=True):
            whole[i] = x
        return loss(f(*whole))

    primals = [jnp.asarray(arguments[i]) for i in moving]
    moved = jax.jit(lambda *xs: jax.jvp(of_moving, xs, xs))(*primals)[1]
    wanted = sum(
        (slope * x).sum()
        for slope, x in zip(gradients(fn, arguments), tensors([arguments[i] for i in moving]), strict=True)
    )
    np.testing.assert_allclose(moved, wanted, rtol=1e-3, atol=1e-4)


def test_a_number_that_depends_on_data_is_an_array():
    f = jtbridge.wrap(lambda v: torch.unique(v).numel())
    assert jax.jit(f)(jnp.array([1.0, 2.0, 2.0])).tolist() == 2
    assert jax.jit(jax.vmap(f))(jnp.array([[1.0, 2.0, 2.0], [4.0, 5.0, 6.0]])).tolist() == [2, 3]


def test_report_gives_the_reason_for_a_call():
    report = jtbridge.explain(sum_of_a_mask, jnp.asarray(V))
    assert (report.backend, report.gradient.split(",")[0]) == ("dlpack", "dlpack")
    assert "sizes depend on the values of its arguments (operator `aten.nonzero.default`)" in report.reasons["xla"]
    assert __file__ in report.reasons["xla"]


def test_scan_over_a_function_with_data_dependent_sizes():
    f = jtbridge.wrap(mean_of_a_mask_times)
    got = jax.jit(lambda v: jax.lax.scan(lambda v, _: (f(v), None), v, None, length=2)[0])(jnp.asarray(V))
    np.testing.assert_allclose(got, mean_of_a_mask_times(mean_of_a_mask_times(torch.from_numpy(V))), rtol=1e-5)


def branches(v):
    return v[v > 0] if v.sum() > 0 else v


def by_a_list(v):
    return v[[i for i in range(4) if v[i] > 0]]


def by_a_number(v):
    return v[: int((v > 0).sum())]


def by_numpy(v):
    return torch.from_numpy(np.flatnonzero(v.detach().numpy() > 0))


def empty_for_most(v):
    return torch.from_numpy(np.flatnonzero(v.detach().numpy() > 100))


def never_ends(v):
    out = []
    while len(out) < v.sum():
        out.append(v[0])
    return torch.stack(out)


@pytest.mark.parametrize("backend", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize(
    "fn",
    [torch.nonzero, torch.unique, branches, by_a_list, by_a_number, by_numpy, empty_for_most],
    ids=lambda f: f.__name__,
)
def test_results_whose_size_depends_on_data_are_refused(fn, backend):
    with pytest.raises(DataDependentShapeError, match=r"axis 0 (is|comes from) .* Return an array of a fixed size"):
        jax.jit(jtbridge.wrap(fn, backend=backend))(jnp.asarray(V))


def test_loop_that_determines_a_result_size_is_refused():
    with pytest.raises(ShapeInferenceError):
        jax.jit(jtbridge.wrap(never_ends))(jnp.asarray(V))


def test_the_error_names_the_result_the_axis_and_the_line():
    def f(v):
        return {"all": v, "some": (v * 2, torch.stack([v, v], 0)[:, v > 0])}

    with pytest.raises(DataDependentShapeError) as caught:
        jax.jit(jtbridge.wrap(f))(jnp.asarray(V))
    line = f.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        "The shape of `result['some'][1]` of `f` depends on the values of its arguments: the size of axis 1 comes from "
        f"`aten.index.Tensor` at {__file__}:{line}. A JAX program needs it before it runs. Return an array of a fixed "
        "size, such as `torch.where(mask, x, 0)` instead of `x[mask]`; or call it outside of `jax.jit`; or pass "
        "`output_shapes=` if you know the shape. If an integer argument gives a size, close over it, so that its value "
        "is known when JAX traces."
    )


@pytest.mark.parametrize(
    ("results", "difference"),
    [
        (lambda v: (v, (v, v)), r"`result`, `result\[0\]`, `result\[1\]` for some values only"),
        (lambda v: ({"a": v}, {"a": v, "b": v}), r"`result\['b'\]` for some values only"),
        (lambda v: ([v], (v,)), r"PyTreeDef\(.*\) or PyTreeDef\(.*\) for different values"),
    ],
)
def test_result_tree_that_depends_on_data_is_refused(results: Callable, difference: str):
    f = jtbridge.wrap(lambda v: results(v)[0] if v.sum() > 0 else results(v)[1])
    with pytest.raises(DataDependentShapeError, match=rf"returns {difference}, and a JAX program needs one tree"):
        jax.jit(f)(jnp.asarray(V))


def test_declared_shapes_are_compared_with_known_shapes():
    def f(v):
        return v[v > 0], v.sum()

    def declared(size, dtype=jnp.float32, rest=()):
        shapes = (jax.ShapeDtypeStruct((size,), dtype), jax.ShapeDtypeStruct(rest, jnp.float32))
        return jax.jit(jtbridge.wrap(f, output_shapes=shapes))

    some, total = declared(3)(jnp.asarray(V))
    assert (some.tolist(), total.tolist()) == ([1.0, 3.0, 0.5], 2.5)
    for wrong in (declared(3, rest=(2,)), declared(3, jnp.int32)):
        with pytest.raises(OutputMismatchError, match="declares"):
            wrong(jnp.asarray(V))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="has shape"):
        jax.block_until_ready(declared(2)(jnp.asarray(V)))


def test_a_check_that_fails_raises_in_the_program():
    f = jax.jit(jtbridge.wrap(a_check_that_raises))
    assert f(jnp.asarray(V)).shape == (4,)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="too large"):
        jax.block_until_ready(f(jnp.asarray(V * 10)))


def test_only_one_branch_may_return():
    """If some branches of a function raise for the given shapes, the types of the other branches count."""

    def f(v):
        return v @ torch.ones(7) if v[v > 0].numel() > 100 else v.sum()

    assert jax.jit(jtbridge.wrap(f))(jnp.asarray(V)).tolist() == 2.5


def test_deepcopy():
    f = jtbridge.wrap(lambda v: copy.deepcopy(v) * 2 + v)
    assert jax.jit(f)(jnp.asarray(V)).tolist() == (V * 3).tolist()
    assert jax.jit(jax.grad(lambda v: f(v).sum()))(jnp.asarray(V)).tolist() == [1.0] * 4
    assert jtbridge.explain(f, jnp.asarray(V)).backend == "xla"


class Casts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c = torch.ones(4, dtype=torch.float64) * 2

    def forward(self, v):
        self.c = self.c.to(v.dtype)
        return v * self.c


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_a_constant_that_is_cast_in_place(backend):
    module = Casts()
    f = jax.jit(jtbridge.wrap(module, backend=backend))
    for _ in range(2):
        assert f(jnp.asarray(V)).tolist() == (V * 2).tolist()
    assert type(module.c) is torch.Tensor


def test_fake_quantize():
    f = jtbridge.wrap(lambda v: torch.fake_quantize_per_tensor_affine(v, 0.1, 0, -10, 10))
    np.testing.assert_allclose(jax.jit(f)(jnp.asarray(V)), [1.0, -1.0, 1.0, 0.5], rtol=1e-6)
    assert jax.jit(jax.grad(lambda v: f(v).sum()))(jnp.asarray(V)).tolist() == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("driver", [None, "gelsy", "gels", "gelss", "gelsd"])
@pytest.mark.parametrize("shape", [(3, 3), (3, 5), (2, 5, 3)])
def test_all_results_of_least_squares(shape: tuple[int, ...], driver: str | None):
    rng = np.random.default_rng(0)
    a = rng.normal(size=shape).astype(np.float32)
    b = rng.normal(size=(*shape[:-1], 2)).astype(np.float32)
    f = jax.jit(jtbridge.wrap(lambda a, b: tuple(torch.linalg.lstsq(a, b, driver=driver))))
    if shape[-2] > shape[-1] and driver in ("gelss", "gelsd"):  # there are residuals only if the rank is full
        with pytest.raises(DataDependentShapeError, match="result\\[1\\]"):
            f(a, b)
        return
    expected = torch.linalg.lstsq(torch.from_numpy(a), torch.from_numpy(b), driver=driver)
    for ours, theirs in zip(f(a, b), expected, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batched", [False, True])
def test_size_wrongly_declared_as_zero_is_detected_at_run_time(backend, batched):
    f = jtbridge.wrap(lambda v: v[v > 0], output_shapes=jax.ShapeDtypeStruct((0,), jnp.float32))
    f, v = (jax.vmap(f), jnp.stack([V, V])) if batched else (f, V)
    assert jax.jit(f)(-jnp.ones_like(v)).shape[-1] == 0
    with pytest.raises(Exception, match=r"OutputMismatchError: Result 0 of `<lambda>` has shape \(3,\)"):
        jax.block_until_ready(jax.jit(f)(v))
