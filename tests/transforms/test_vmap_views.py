"""vmap of functions that write to a view, or to a tensor that is a view for some strides, against a loop in torch.

A batch may have other strides than a row, and torch.vmap may take a copy where a row has a view. Every operator that
may return a view is tried on arguments and on intermediate results, and its result or its argument is written to.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import jtbridge
from jtbridge._compat._torch_eager import _users_of_one_tensor
from jtbridge.errors import SequentialVmapWarning
from tests.compare import assert_close

ROWS, ROW = 3, (4, 4)
BATCH = np.random.default_rng(0).uniform(0.5, 1.5, (ROWS, *ROW)).astype(np.float32)
ONE = torch.tensor(1)

# Operators of torch that may return a view of their argument, under the names of their schemas where they have one.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "_reshape_alias": lambda x: torch.ops.aten._reshape_alias(x, (x.numel(),), (1,)),
    "adjoint": lambda x: x.adjoint(),
    "alias": lambda x: torch.ops.aten.alias(x),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 1), 1),
    "as_tensor": torch.as_tensor,
    "broadcast_to": lambda x: torch.broadcast_to(x[0], x.shape)[0],
    "chunk": lambda x: x.chunk(2)[0],
    "conj": lambda x: x.conj(),
    "contiguous": lambda x: x.contiguous(),
    "cpu": lambda x: x.cpu(),
    "detach": lambda x: x.detach(),
    "diagonal": lambda x: x.diagonal(),
    "dsplit": lambda x: torch.dsplit(x[..., None], 1)[0],
    "expand": lambda x: x[:1].expand(4, -1)[2],
    "expand_as": lambda x: x[:1].expand_as(x)[1],
    "flatten": lambda x: torch.flatten(x, 0, 1),
    "hsplit": lambda x: torch.hsplit(x, [1])[0],
    "lift": lambda x: torch.ops.aten.lift(x),
    "lift_fresh": lambda x: torch.ops.aten.lift_fresh(x),
    "linalg_diagonal": torch.linalg.diagonal,
    "mH": lambda x: x.mH,
    "mT": lambda x: x.mT,
    "matrix_H": lambda x: x.H,
    "moveaxis": lambda x: torch.moveaxis(x, 0, 1),
    "movedim": lambda x: x.movedim(0, 1),
    "narrow": lambda x: x.narrow(0, 1, 1),
    "numpy_T": lambda x: x.T,
    "permute": lambda x: x.permute(1, 0),
    "positive": lambda x: +x,
    "ravel": lambda x: x.ravel(),
    "real": torch.real,
    "reshape": lambda x: x.reshape(-1),
    "reshape_as": lambda x: x.reshape_as(torch.ones(x.numel())),
    "resolve_conj": lambda x: x.resolve_conj(),
    "resolve_neg": lambda x: x.resolve_neg(),
    "select": lambda x: x.select(0, 1),
    "slice": lambda x: x[:, ::2],
    "split": lambda x: x.split(1)[1],
    "split_with_sizes": lambda x: x.split_with_sizes([1, x.shape[0] - 1])[0],
    "squeeze": lambda x: x[:1].squeeze(),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "swapdims": lambda x: x.swapdims(0, 1),
    "t": lambda x: x.t(),
    "tensor_split": lambda x: x.tensor_split((1,))[1],
    "to": lambda x: x.to(torch.float32),
    "transpose": lambda x: x.transpose(0, 1),
    "unbind": lambda x: x.unbind(0)[1],
    "unflatten": lambda x: x.unflatten(0, (-1, 1)),
    "unfold": lambda x: x.unfold(0, 2, 2),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "view": lambda x: x.view(-1),
    "view_as": lambda x: x.view_as(torch.ones(x.numel())),
    "view_as_complex": lambda x: torch.view_as_complex(x[:, :2]),
    "view_as_real": lambda x: torch.view_as_real(torch.view_as_complex(x[:, :2])),
    "vsplit": lambda x: torch.vsplit(x, [1])[1],
    # Operators whose schema does not declare a view, or in other forms.
    "x[1]": lambda x: x[1],
    "x[None]": lambda x: x[None],
    "x[..., 0]": lambda x: x[..., 0],
    "x[True]": lambda x: x[True],
    "x[tensor]": lambda x: x[ONE],
    "x[:, tensor]": lambda x: x[:, ONE],
    "x[tensor of each row]": lambda x: x[(x.sum() > 16).long()],
    "x[:, tensor of each row]": lambda x: x[:, (x.sum() > 16).long()],
    "x[[1]]": lambda x: x[[1]],
    "iter": lambda x: list(x)[1],
    "view with a dtype": lambda x: x.view(torch.int32),
    "aten.reshape": lambda x: torch.ops.aten.reshape.default(x, [-1]),
    "reshape twice": lambda x: x.reshape(-1).reshape(x.shape)[0],
    "contiguous part": lambda x: x[:, :1].contiguous(),
    "type": lambda x: x.type(torch.float32),
    "type_as": lambda x: x.type_as(torch.ones(())),
    "data": lambda x: x.data,
    "atleast_3d": torch.atleast_3d,
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, torch.ones(()))[0],
    "meshgrid": lambda x: torch.meshgrid(x[0], x[0], indexing="ij")[0][0, 0],
    "diag": torch.diag,
    "einsum": lambda x: torch.einsum("ij->ji", x),
    "einsum of a diagonal": lambda x: torch.einsum("ii->i", x[:2, :2]),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "pixel_shuffle": lambda x: torch.pixel_shuffle(x[None], 1),
    "cartesian_prod": lambda x: torch.cartesian_prod(x[0]),
    "sum_to_size": lambda x: x.sum_to_size(x.shape),
    "Flatten": torch.nn.Flatten(0),
    "Identity": torch.nn.Identity(),
    # Copies.
    "clone": lambda x: x.clone(),
    "repeat": lambda x: x.repeat(1, 1),
    "cat": lambda x: torch.cat([x]),
    "roll": lambda x: x.roll(0),
    "pad": lambda x: F.pad(x, (0, 0)),
    "to with a copy": lambda x: x.to(torch.float32, copy=True),
    "narrow_copy": lambda x: x.narrow_copy(0, 0, 1),
    "index_select": lambda x: x.index_select(0, torch.tensor([0])),
}
# Operators of sparse, nested, conjugated or other tensors that cannot be arguments, or for torch's internal use.
NOT_TRIED = {
    *("_autocast_to_full_precision", "_autocast_to_reduced_precision", "_conj", "_fw_primal", "_grad_sum_to_size"),
    *("_indices", "_make_dual", "_ncf_unsqueeze", "_ncf_view", "_neg_view", "_nested_get_values", "_unpack_dual"),
    *("_nested_view_from_buffer", "_nested_view_from_jagged", "_sparse_broadcast_to", "_values", "ccol_indices"),
    *("_test_autograd_multiple_dispatch_view", "coalesce", "col_indices", "crow_indices", "cuda", "imag", "indices"),
    *("pin_memory", "row_indices", "setdefault", "slice_inverse", "values"),
}
# The tensors that are viewed. From "product" on, some results of a batch have other strides than those of a row.
SOURCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "argument": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[:, ::2],
    "computed": lambda x: x.t() * 2,
    "product": lambda x: torch.addmm(x, x.t(), x.t()),
    "convolution": lambda x: F.conv1d(x[None], x[:, :, None])[0],
    "solution": lambda x: torch.linalg.solve(x + 4 * torch.eye(4), x),
    "batch of convolutions": lambda x: F.conv1d(torch.stack([x, x + 1]), x[:, :, None]).transpose(0, 1)[1:3].flatten(1),
}


def change(y: torch.Tensor) -> None:
    y.add_(1 << 20) if y.dtype is torch.int32 else y.mul_(3).add_(1)


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "result": lambda x, y: change(y),
    "argument": lambda x, y: change(x),
    "assigned": lambda x, y: y.__setitem__(..., 7),
    "out": lambda x, y: torch.neg(x.clone(), out=x),
    "inplace": lambda x, y: F.hardtanh(x, -1.0, 0.7, inplace=True),
}


def function(view: Callable, source: Callable, write: Callable) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    def f(x):
        z = source(x)
        y = view(z)
        write(z, y)
        y = y.float() if y.dtype is torch.int32 else torch.view_as_real(y) if y.is_complex() else y
        return z * 1, y * 1, x * 1

    return f


def rows_of(f: Callable[[torch.Tensor], Any], batch: np.ndarray) -> list[torch.Tensor]:
    rows = [f(torch.from_numpy(row.copy())) for row in batch]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def compare(f: Callable, axis: int = 0, backend: str = "auto") -> None:
    try:
        expected = rows_of(f, BATCH)
    except RuntimeError:  # a view of that size or stride does not exist
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SequentialVmapWarning)
        actual = jax.vmap(jtbridge.wrap(f, backend=backend), in_axes=axis)(jnp.asarray(np.moveaxis(BATCH, 0, axis)))
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours, theirs.numpy(), 1e-4)


def test_every_operator_that_may_return_a_view_is_tested():
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        aliases = [a.alias_info for a in schema.arguments if "Tensor" in str(a.type) and a.alias_info is not None]
        returned = [r.alias_info for r in schema.returns if r.alias_info is not None]
        if schema.name.startswith("aten::") and any(not alias.is_write for alias in returned):
            found |= {schema.name.removeprefix("aten::")} if any(not alias.is_write for alias in aliases) else set()
    assert found - set(VIEWS) <= NOT_TRIED
    assert len(found & set(VIEWS)) > 50


@pytest.mark.parametrize("view", VIEWS)
def test_eager(view: str):
    for source in SOURCES.values():
        for number, write in enumerate(WRITES.values()):
            compare(function(VIEWS[view], source, write), axis=[0, 1, -1][number % 3])


# In-place functions that give a tensor other sizes, or other memory.
RESIZING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "resize_": lambda x: x.clone().resize_(3) * 1,
    "resize_ of a name": lambda x: [y := x.clone(), y.resize_(2, 2)][0] * 1,
    "resize_as_": lambda x: x.clone().resize_as_(torch.zeros(2, 3)) * 1,
    "as_strided_": lambda x: x.clone().as_strided_((2, 2), (1, 2)) * 1,
    "set_": lambda x: x.clone().set_(x[0].clone()) * 1,
    "set_ of a constant": lambda x: x.clone().set_(torch.ones(3)) * 2,
    "transpose_": lambda x: x.clone().transpose_(0, 1) * 1,
    "squeeze_": lambda x: x.clone()[:1].squeeze_(0) * 1,
    "unsqueeze_": lambda x: x.clone().unsqueeze_(0) * 1,
}


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
@pytest.mark.parametrize("name", RESIZING)
def test_resizing(name: str, backend: str):
    for axis in (0, 1, -1):
        compare(lambda x: (RESIZING[name](x),), axis, backend)


# Running statistics that are views of `x`; batch normalisation writes to them.
STATISTICS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "rows": lambda x: (x[0], x[1]),
    "columns": lambda x: (x[:, 0], x[:, 1]),
    "rows of the transposed": lambda x: (x.t()[0], x.t()[1]),
    "one for all channels": lambda x: (x[0, :1].expand(4).clone(), x[1]),
}
NORMS: dict[str, Callable[..., torch.Tensor]] = {
    "batch_norm": lambda y, mean, var: F.batch_norm(y, mean, var, training=True),
    "torch.batch_norm": lambda y, mean, var: torch.batch_norm(y, None, None, mean, var, True, 0.1, 1e-5, False),
    "native_batch_norm": lambda y, mean, var: torch.native_batch_norm(y, None, None, mean, var, True, 0.1, 1e-5)[0],
    "instance_norm": lambda y, mean, var: F.instance_norm(y[..., None].repeat(1, 1, 2), mean, var)[..., 0] * 0,
}


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("view", STATISTICS)
def test_running_statistics(view: str, norm: str, backend: str):
    def f(x):
        state = x.clone()
        return NORMS[norm](x[:2] + x[2:] ** 2, *STATISTICS[view](state)), state

    for axis in (0, 1, -1):
        compare(f, axis, backend)


CALLED = ["reshape", "contiguous", "flatten", "x[tensor of each row]", "diagonal", "clone"]


@pytest.mark.parametrize("backend", ["dlpack", "callback"])
@pytest.mark.parametrize("source", ["argument", "transposed", "convolution"])
@pytest.mark.parametrize("view", CALLED)
def test_calls_that_write_to_views(view: str, source: str, backend: str):
    for number, write in enumerate(WRITES.values()):
        compare(function(VIEWS[view], SOURCES[source], write), axis=[0, 1, -1][number % 3], backend=backend)


def convolved(x: torch.Tensor) -> torch.Tensor:
    """A batch of the result has other strides than a row."""
    return F.conv1d(torch.stack([x, x + 1]), x[:, :, None])


def view_of_convolution(x):
    h = convolved(x)
    y = h.reshape(-1)
    y += 1
    return ((h * y.reshape(h.shape)).sum(),)


def other_view_of_convolution(x):
    h = convolved(x)
    first = h[0]
    h = h.flatten()
    h += 1
    return ((first * 2).sum() + h.sum(),)


def convolution_after_its_view(x):
    h = convolved(x)
    y = h.flatten()
    F.hardtanh(h, -1.0, 2.0, inplace=True)
    return ((y * h.flatten()).sum(),)


def unless_contiguous(x):
    h = convolved(x)
    y = h if h.is_contiguous() else h.clone()
    y += 1
    return ((h * y).sum(),)


def memory_of_convolution(x):
    return ((convolved(x).as_strided((4,), (1,), 14) * x[0]).sum(),)


def integers_of_convolution(x):
    h = convolved(x).int()
    y = h.reshape(-1)
    y <<= 1  # unlike +=, it does not call a method whose name ends with "_"
    return ((h + y.reshape(h.shape)).sum() * x[0, 0],)


BY_STRIDES = [
    integers_of_convolution,
    view_of_convolution,
    other_view_of_convolution,
    convolution_after_its_view,
    unless_contiguous,
    memory_of_convolution,
]


@pytest.mark.parametrize("backend", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize("f", BY_STRIDES, ids=lambda f: f.__name__)
def test_different_strides_in_a_batch(f: Callable, backend: str):
    with pytest.warns(SequentialVmapWarning):
        actual = jax.vmap(jtbridge.wrap(f, backend=backend))(jnp.asarray(BATCH))
    assert_close(actual[0], rows_of(f, BATCH)[0].numpy(), 1e-4)


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
@pytest.mark.parametrize("f", [*BY_STRIDES, function(VIEWS["x[tensor of each row]"], *[lambda *xs: xs[0]] * 2)])
def test_gradients(f: Callable, backend: str):
    g = jtbridge.wrap(lambda x: sum(y.sum() for y in f(x)), backend=backend)
    expected = []
    for row in BATCH:
        x = torch.from_numpy(row.copy()).requires_grad_()
        torch.stack([y.sum() for y in f(x.clone())]).sum().backward()
        expected.append(x.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SequentialVmapWarning)
        of_vmap = jax.grad(lambda x: jax.vmap(g)(x).sum())(jnp.asarray(BATCH))
        vmap_of = jax.vmap(jax.grad(g))(jnp.asarray(BATCH))
    assert_close(of_vmap, torch.stack(expected).numpy(), 1e-4)
    assert_close(vmap_of, torch.stack(expected).numpy(), 1e-4)


def bits_of_convolution(x, write):
    h = (convolved(x) * 4).int()
    y = h.reshape(-1)
    write(y)
    return h * 1, y * 1


@pytest.mark.parametrize("name", ["__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"])
def test_augmented_assignment_of_integers(name: str):
    f = functools.partial(bits_of_convolution, write=lambda y: getattr(y, name)(3))
    with pytest.warns(SequentialVmapWarning):
        actual = jax.vmap(jtbridge.wrap(f))(jnp.asarray(BATCH))
    for ours, theirs in zip(actual, rows_of(f, BATCH), strict=True):
        np.testing.assert_array_equal(ours, theirs.numpy())


INDICES = {
    "list": [0, 1],
    "list in a tuple": ([0, 1],),
    "array": np.array([0, 1]),
    "list of bools": [True] + [False] * 15,
    "slice": slice(0, 2),
    "new axis": (None, slice(0, 2)),
    "tensor": torch.tensor([0, 1]),
}


@pytest.mark.parametrize("name", INDICES)
def test_assignment_to_a_part_by(name: str):
    def f(x):
        h = convolved(x)[0]
        y = h.reshape(-1)  # a view for a row
        y[INDICES[name]] = 5
        return h * 1, y * 1

    with pytest.warns(SequentialVmapWarning):
        actual = jax.vmap(jtbridge.wrap(f))(jnp.asarray(BATCH))
    for ours, theirs in zip(actual, rows_of(f, BATCH), strict=True):
        assert_close(ours, theirs.numpy(), 1e-4)


def sums_in_place(x):
    y = x[0].clone()
    y[1:] += y[:-1]
    return y


def test_a_write_that_torch_refuses_for_a_row_is_refused_for_a_batch():
    with pytest.raises(RuntimeError, match="single memory location"):
        sums_in_place(torch.ones(*ROW))
    with pytest.raises(RuntimeError, match="single memory location"):
        jax.vmap(jtbridge.wrap(sums_in_place))(jnp.asarray(BATCH))


def columns_in_place(x):
    y = x.clone()
    y[:, 1:] += y[:, :-1]  # torch does not see that these share memory
    y[0] = y[1]
    return (y,)


def test_a_write_to_memory_that_it_reads_runs_by_rows():
    with pytest.warns(SequentialVmapWarning):
        actual = jax.vmap(jtbridge.wrap(columns_in_place))(jnp.asarray(BATCH))
    assert_close(actual[0], rows_of(columns_in_place, BATCH)[0].numpy(), 1e-6)


def views_of_arguments(x):
    y = x.flatten()
    y += 1
    x.t()[0] = 3
    return x * 1, y * 1


def views_of_copies(x):
    z = x.clone()
    z.reshape(2, 8)[0] = 5
    return z.contiguous().mul_(2), z * 1


def results_in_use_alone(x):
    h = convolved(x).reshape(-1)
    h += 1
    heads = x.reshape(4, 2, 2).transpose(0, 1)
    attention = F.scaled_dot_product_attention(heads, heads, heads).transpose(0, 1).reshape(4, 4)
    F.relu(attention.sub_(0.9), inplace=True)
    return h, attention


def writes_elsewhere(x):
    h = convolved(x)
    y = h.reshape(-1)
    z = x.clone()
    z += 1
    return F.relu_(h * 2), y, z


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
@pytest.mark.parametrize("f", [views_of_arguments, views_of_copies, results_in_use_alone, writes_elsewhere])
def test_harmless_writes_run_as_one_batch(f: Callable, backend: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error", SequentialVmapWarning)
        actual = jax.vmap(jtbridge.wrap(f, backend=backend))(jnp.asarray(BATCH))
    for ours, theirs in zip(actual, rows_of(f, BATCH), strict=True):
        assert_close(ours, theirs.numpy(), 1e-4)


@pytest.mark.parametrize("nested", [0, 1])
def test_nested_batches(nested: int):
    batches = np.stack([BATCH, BATCH + 0.5])
    f = jtbridge.wrap(view_of_convolution)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SequentialVmapWarning)
        actual = jax.vmap(jax.vmap(f), in_axes=nested)(jnp.asarray(np.moveaxis(batches, 0, nested)))
    for ours, batch in zip(actual[0], batches, strict=True):
        assert_close(ours, rows_of(view_of_convolution, batch)[0].numpy(), 1e-4)


def test_a_first_batch_of_second_derivatives_is_one_batch():
    _users_of_one_tensor.cache_clear()  # as in a new process
    fn = jtbridge.wrap(lambda w: (F.layer_norm(w, (3,), w) ** 3).sum(), backend="dlpack")
    w = jnp.array([1.0, 2.0, 4.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", SequentialVmapWarning)
        hessian = jax.jacrev(jax.jacfwd(fn))(w)
    expected = jax.hessian(lambda w: (((w - w.mean()) / jnp.sqrt(w.var() + 1e-5) * w) ** 3).sum())(w)
    assert_close(hessian, expected, 1e-3)
