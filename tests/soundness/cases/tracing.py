"""Tracing and lowering."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ._case import CASES, ROWS, Case, V, case


@case("tracing")
def sign_of_a_zero_constant(run):
    zeros = torch.tensor([0.0, -0.0, 0.0, -0.0])
    yield run(run.wrap(lambda v: v / zeros), V)


@case("tracing")
def two_constants_that_compare_equal(run):
    a, b = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    yield run(run.wrap(lambda v: torch.stack([v[:2] / a, v[:2] / b])), V)


@case("tracing")
def number_minus_zero(run):
    yield run(run.wrap(lambda v: torch.full_like(v, -0.0) * 1), V)
    yield run(run.wrap(lambda v: 1 / (v * -0.0)), V)


@case("tracing")
def nan_constant(run):
    a = torch.tensor([float("nan"), 1.0, float("inf"), -float("inf")])
    yield run(run.wrap(lambda v: v * a), V)


@case("tracing")
def grad_mode_with_a_parameter(run):
    p = nn.Parameter(torch.full((4,), 2.0))
    f = run.wrap(lambda v: p * v * (2 if torch.is_grad_enabled() else 3))
    yield run(f, V)


@case("tracing")
def requires_grad_of_a_result(run):
    p = nn.Parameter(torch.full((4,), 2.0))
    f = run.wrap(lambda v: v * 2 if (p * v).requires_grad else v * 3)
    yield run(f, V)


@case("tracing", "xla")
def swallowed_exception(run):
    def f(v):
        try:
            s = float(v.sum())
        except Exception:  # noqa: BLE001 - as users write it
            s = 0.0
        return v * s

    yield run(run.wrap(f), V)


@case("tracing", "xla")
def swallowed_exception_of_item(run):
    def f(v):
        try:
            n = v[0].item()
        except (RuntimeError, TypeError, ValueError):
            n = -1
        return v + n

    yield run(run.wrap(f), V)


@case("tracing", "xla")
def caught_error_of_linear_algebra(run):
    def f(m):
        try:
            return torch.linalg.inv(m)
        except torch.linalg.LinAlgError:
            return m * 0 - 1

    f = run.wrap(f)
    yield run(f, torch.eye(2) * 2)
    yield run(f, torch.ones(2, 2))


@case("tracing", "xla")
def caught_error_of_a_second_factorization(run):
    def f(m):
        y = torch.linalg.inv(m)
        for _ in range(3):
            try:
                return torch.linalg.cholesky(m) + y
            except RuntimeError:
                m = m + torch.eye(2)
        return y

    f = run.wrap(f)
    yield run(f, torch.eye(2) * 2)
    yield run(f, torch.eye(2) * -0.5)


@case("tracing", "xla")
def caught_index_error(run):
    table = torch.arange(6.0).reshape(3, 2)

    def f(i):
        try:
            return F.embedding(i, table)
        except IndexError:
            return torch.zeros(2, 2)

    f = run.wrap(f)
    yield run(f, torch.tensor([0, 2]))
    yield run(f, torch.tensor([0, 5]))


@case("tracing")
def error_that_nobody_catches(run):
    def f(m):
        try:
            return torch.linalg.inv(m).sum(0)
        finally:
            m = m * 2

    yield run(run.wrap(f), torch.eye(2) * 2)


@case("tracing")
def branch_on_data(run):
    f = run.wrap(lambda v: v * 2 if v.sum() > 5 else v - 2)
    yield run(f, V)
    yield run(f, -V)


_CONDITIONS = {
    "equal": lambda v: torch.equal(v, V),
    "allclose": lambda v: torch.allclose(v, V + 1e-3, rtol=1e-2),
    "allclose of no numbers": lambda v: torch.allclose(v * torch.nan, V * torch.nan, equal_nan=True),
    "any": lambda v: bool(torch.any(v > 3.5)),
    "is nonzero": lambda v: torch.is_nonzero(v[0] - 1),
    "truth of a number": lambda v: v[0] - 1,
    "number in a tensor": lambda v: 3 in v,
    "tensor in a tensor": lambda v: v[0] in torch.tensor([1.0, 7.0]),
    "item": lambda v: (v > 3).any().item(),
    "two conditions": lambda v: v.sum() > 5 and not v[0] < 0,
}


def _branches(name: str, condition: Callable[[torch.Tensor], Any]) -> None:
    """One row for a condition in an ``if``, with values for both ways."""

    def script(run: Any) -> Iterator[Any]:
        f = run.wrap(lambda v: v * 2 if condition(v) else v.sin())
        for v in (V, -V, torch.tensor([0.0, 3.0, 0.0, torch.nan])):
            yield run(f, v)
            yield run.grad(f, v)
        yield run.vmap(f, torch.stack([V, -V, V + 1]))
        yield run.jacfwd(f, V)

    CASES.append(Case(f"branch by {name}", "tracing", script))


for _name, _condition in _CONDITIONS.items():
    _branches(_name, _condition)


@case("tracing", "xla")
def forward_mode_of_products_that_are_scattered(run):
    i = torch.tensor([0, 0, 1, 1])
    f = run.wrap(lambda v: v.scatter_reduce(0, i, v * 2, "prod"))
    yield run.grad(f, V)
    yield run.jacfwd(f, V)


@case("tracing")
def truth_that_is_returned(run):
    f = run.wrap(lambda v: torch.tensor(torch.equal(v, V)) & torch.tensor(3 in v))
    yield run(f, V)
    yield run(f, -V)


@case("tracing")
def branch_that_writes(run):
    def f(v):
        if v[0] > 0:
            v.mul_(3)
        return v + 1

    f = run.wrap(f)
    yield run(f, V)
    yield run(f, -V)


@case("tracing", "xla")
def check_before_a_caught_error(run):
    def f(m):
        if m.isnan().any():
            raise ValueError("no numbers")
        try:
            return torch.linalg.inv(m)
        except torch.linalg.LinAlgError:
            return m * 0 - 1

    f = run.wrap(f)
    yield run(f, torch.eye(2) * 2)
    yield run(f, torch.ones(2, 2))


@case("tracing", "xla")
def error_caught_on_one_of_two_ways(run):
    def f(m):
        if m.sum() > 100:
            return m * 2
        try:
            return torch.linalg.inv(m)
        except torch.linalg.LinAlgError:
            return m * 0 - 1

    f = run.wrap(f)
    yield run(f, torch.eye(2) * 2)
    yield run(f, torch.ones(2, 2))
    yield run(f, torch.ones(2, 2) * 100)


@case("tracing", "xla")
def check_before_an_assignment_to_data(run):
    def f(v):
        if v.isnan().any():
            raise ValueError("no numbers")
        w = v.clone()
        w.data = v * 5
        return w

    yield run(run.wrap(f), V)


@case("tracing", "xla")
def branch_to_another_dtype(run):
    f = run.wrap(lambda v: (v.int() if v[0] > 0 else v.long()).float())
    yield run(f, V)
    g = run.wrap(lambda v: v.sum() if v[0] > 0 else v.sum().reshape(1)[0])
    yield run(g, -V)


@case("tracing", "xla")
def many_branches(run):
    def f(v):
        for limit in range(6):
            if v.sum() < limit:
                return v + limit
        return v

    f = run.wrap(f)
    yield run(f, V)
    yield run(f, V / 3)


@case("tracing", "xla")
def loop_on_data(run):
    def f(v):
        while v.sum() < 100:
            v = v * 2 + 1
        return v

    yield run(run.wrap(f), V)


@case("tracing", "xla")
def loop_on_data_that_never_ends_for_zeros(run):
    def f(v):
        while v.sum() < 100:
            v = v * 2
        return v

    yield run(run.wrap(f), V)


@case("tracing", "jit")
def loop_on_a_numpy_view_that_never_ends_for_examples(run):
    def f(v):
        while v.numpy()[0] != 10:
            v = v * 1
        return v

    yield run(run.wrap(f), V * 10)


@case("tracing", "jit")
def loop_on_an_array_that_never_ends_for_examples(run):
    def f(v):
        while np.asarray(v)[0] != 10 or v.tolist()[0] != 10:
            pass
        return v

    yield run(run.wrap(f), V * 10)


@case("tracing", "jit")
def loop_on_data_that_never_ends_for_examples(run):
    def f(v):
        while float(v[0]) != 10:
            v = v * 1
        return v

    yield run(run.wrap(f), V * 10)


@case("tracing", "xla")
def numpy_inside(run):
    yield run(run.wrap(lambda v: torch.from_numpy(np.sort(v.numpy())[::-1].copy())), V)


@case("tracing", "xla")
def tolist_inside(run):
    yield run(run.wrap(lambda v: torch.tensor([x * 2 for x in v.tolist()])), V)


@case("tracing")
def order_of_a_dict_argument(run):
    f = run.wrap(lambda d: torch.cat(list(d.values())))
    yield run(f, {"b": V, "a": V * 10, "c": V * 100})


@case("tracing")
def order_of_keywords(run):
    f = run.wrap(lambda **d: torch.cat(list(d.values())))
    yield run(f, z=V, a=V * 10)


@case("tracing")
def order_of_keys_after_another_order(run):
    f = run.wrap(lambda d: torch.cat([d[k] * i for i, k in enumerate(d)]))
    yield run(f, {"a": V, "b": V * 10})
    yield run(f, {"b": V * 10, "a": V})


@case("tracing")
def ordered_dict_moved_to_end(run):
    f = run.wrap(lambda d: torch.cat(list(d.values())))
    yield run(f, dict(collections.OrderedDict(z=V, b=V * 2)))


@case("tracing")
def equal_of_two_dtypes(run):
    f = run.wrap(lambda a, b: torch.tensor(torch.equal(a, b)))
    yield run(f, torch.tensor([1.0]), torch.tensor([1]))


@case("tracing")
def hook_on_a_tensor(run):
    def f(v):
        y = v * 1
        if y.requires_grad:
            y.register_hook(lambda g: g * 10)
        return y**2

    f = run.wrap(f)
    yield run(f, V)
    yield run.grad(f, V)


@case("tracing", "eager", "jit")
def hook_on_a_tensor_forward(run):
    def f(v):
        y = v * 1
        if y.requires_grad:
            y.register_hook(lambda g: g * 10)
        return y**2

    yield run.jacfwd(run.wrap(f), V)


@case("tracing", "xla")
def forward_mode_where_a_gradient_has_no_derivative(run):
    def f(v):
        with torch.no_grad():
            w = v * 2
        return F.hardsigmoid(v) * w

    yield run.jacfwd(run.wrap(f), V)


@case("tracing")
def forward_mode_and_a_write_where_a_gradient_has_no_derivative(run):
    def f(v):
        v[0] = 0.5
        return F.hardsigmoid(v) * v

    f = run.wrap(f)
    yield run.either(
        lambda: torch.tensor([[0.0] * 4, *torch.diag(torch.tensor([0.0, 7 / 6, 1.0, 1.0]))[1:].tolist()]),
        lambda: jax.jacfwd(f)(jnp.asarray(V.numpy())) + 0.0,
    )


@case("tracing")
def numbers_rolled_in_a_batch(run):
    yield run.vmap(run.wrap(lambda v: v.sum().roll(1) + v), ROWS)


@dataclasses.dataclass(frozen=True)
class Options:
    """A static argument whose values compare equal with different types."""

    scale: Any


@case("tracing")
def static_argument_by_type(run):
    f = run.wrap(lambda v, n: v * 2 if isinstance(n, bool) else v * 3 if isinstance(n, int) else v * 5)
    for n in (1, 1.0, True):
        yield run(lambda v, n=n: f(v, n), V)


@case("tracing")
def static_dataclass_by_type(run):
    f = run.wrap(lambda v, o: v * (2 if isinstance(o.scale, bool) else 3 if isinstance(o.scale, int) else 5))
    for n in (1, 1.0, True):
        yield run(lambda v, n=n: f(v, Options(n)), V)


@case("tracing")
def static_tuple_by_type(run):
    f = run.wrap(lambda v, o: v * (2 if isinstance(o[0], bool) else 3 if isinstance(o[0], int) else 5))
    for n in (1, 1.0, True):
        yield run(lambda v, n=n: f(v, (n, "x")), V)


@case("tracing")
def static_minus_zero(run):
    f = run.wrap(lambda v, n: v / torch.tensor(n))
    for n in (0.0, -0.0):
        yield run(lambda v, n=n: f(v, n), V)


class _Unused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.set_materialize_grads(False)
        return v * 2, v * 3

    @staticmethod
    def backward(ctx, a, b):
        return a * 2 if b is None else a * 2 + b * 3 + 100


@case("tracing")
def gradients_not_materialized(run):
    f = run.wrap(lambda v: _Unused.apply(v)[0])
    yield run(f, V)
    yield run.grad(f, V)


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        return v**2

    @staticmethod
    def backward(ctx, g):
        return g * 100


@case("tracing")
def gradient_of_an_autograd_function(run):
    yield run.grad(run.wrap(_Wrong.apply), V)


@case("tracing")
def straight_through(run):
    yield run.grad(run.wrap(lambda v: v + ((v * 3).round() - v).detach() * v), V)


@case("tracing")
def index_out_of_range(run):
    index = torch.tensor([0, 9])
    f = run.wrap(lambda v, i: v.gather(0, i))
    yield run.fails(f, V, index)


@case("tracing")
def gather_of_a_negative_index(run):
    f = run.wrap(lambda v, i: v.gather(0, i))
    yield run.fails(f, V, torch.tensor([0, -1]))


@case("tracing")
def scatter_of_a_negative_index(run):
    f = run.wrap(lambda v, i: v.scatter(0, i, torch.ones(2)))
    yield run.fails(f, V, torch.tensor([0, -1]))


@case("tracing")
def index_select_of_a_negative_index(run):
    f = run.wrap(lambda v, i: v.index_select(0, i))
    yield run.fails(f, V, torch.tensor([0, -1]))


@case("tracing")
def embedding_out_of_range(run):
    table = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    yield run.fails(run.wrap(lambda i: F.embedding(i, table)), torch.tensor([0, 5]))


@case("tracing")
def negative_index_where_torch_has_it(run):
    yield run(run.wrap(lambda v, i: v[i]), V, torch.tensor([0, -1]))


@case("tracing")
def integer_division_and_remainder(run):
    n = torch.tensor([-7, 7, -7, 7])
    d = torch.tensor([2, -2, -2, 2])
    yield run(run.wrap(lambda a, b: [a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc")]), n, d)


@case("tracing")
def integers_wrap_around(run):
    yield run(run.wrap(lambda a: a.to(torch.uint8) * 2), torch.tensor([200, 255, 3]))
    yield run(run.wrap(lambda a: (a.to(torch.int8) + 1).long()), torch.tensor([127, -128, 3]))


@case("tracing")
def rounding_to_even(run):
    yield run(run.wrap(torch.round), torch.tensor([0.5, 1.5, 2.5, -0.5]))


@case("tracing")
def promotion_of_numbers(run):
    i = torch.tensor([1, 2])
    yield run(run.wrap(lambda i: [i * 2.5, i / 2, i + True, i * torch.tensor(2.0), i**2]), i)


@case("tracing")
def nan_of_extrema(run):
    x = torch.tensor([1.0, float("nan"), 3.0])
    one = torch.ones(3)
    yield run(run.wrap(lambda x: [x.max(), x.argmax(), torch.fmax(x, one), x.sort().values, x.clamp(0, 2)]), x)


@case("tracing")
def nan_times_a_mask(run):
    x, mask = torch.tensor([float("nan"), float("inf"), -1.0, 5.0]), torch.tensor([False, False, False, True])
    yield run(run.wrap(lambda x, m: [x * m, (x * m.float()).sum(), 1 / (x[2:] * m[2:])]), x, mask)


@case("tracing")
def gradient_at_kinks(run):
    x = torch.tensor([0.0, -0.0, 1.0, -1.0])
    for f in (torch.relu, torch.abs, lambda v: v.clamp(0, 1), F.hardtanh, lambda v: torch.maximum(v, v * 2)):
        yield run.grad(run.wrap(f), x)


@case("tracing")
def gradient_at_ties(run):
    x = torch.tensor([1.0, 1.0, 0.0])
    for f in (lambda v: v.max(), lambda v: v.amax(), lambda v: v.sort().values[0], lambda v: v.max(0).values):
        yield run.grad(run.wrap(f), x)


@case("tracing")
def saved_tensor_written_behind_autograd(run):
    def f(v):
        y = v * 0.5
        z = F.logsigmoid(y) + y.sin() * y.tanh()
        y.data.mul_(0.9)
        return z

    yield run.grad(run.wrap(f), V)


@case("tracing")
def residual_that_is_a_loss(run):
    for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.l1_loss):
        yield run.grad(run.wrap(lambda v, loss=loss: loss(v.sigmoid(), v.cos() ** 2) * v), V)


@case("tracing")
def gradient_of_where_with_a_pole(run):
    yield run.grad(run.wrap(lambda v: torch.where(v > 1.5, v.sqrt(), v)), V)
    yield run.grad(run.wrap(torch.linalg.vector_norm), torch.zeros(3))


@case("tracing")
def writes_that_overlap(run):
    def f(v):
        y = v.clone()
        a, b = y[:3], y[1:]
        a.mul_(2)
        b.add_(10)
        y.view(2, 2)[0] = y[2:].clone()
        return y, a * 1, b * 1

    yield run(run.wrap(f), V)


@case("tracing", "xla")
def view_at_an_index_tensor_is_written(run):
    def f(v, i):
        y = v.clone()
        part = y[i]
        part += 100
        return y

    f = run.wrap(f)
    yield run(f, V, torch.tensor(2))
    yield run.vmap(f, torch.stack([V, V]), torch.tensor([1, 3]))


@case("tracing", "xla")
def base_of_a_view_at_an_index_tensor_is_written(run):
    def f(v, i):
        y = v * 2
        part = y[i]
        y.fill_(7)
        return part * 1

    f = run.wrap(f)
    yield run(f, V, torch.tensor(2))
    yield run.vmap(f, torch.stack([V, V]), torch.tensor([1, 3]))


@case("tracing")
def elements_at_index_tensors_are_replaced(run):
    def f(v, i):
        y = v.clone()
        for _ in range(2):
            y[i] = y[i] * 3 + y[i - 1]
        return y

    f = run.wrap(f)
    yield run(f, V, torch.tensor(2))
    yield run.vmap(f, torch.stack([V, V]), torch.tensor([1, 3]))


@case("tracing")
def one_array_as_two_arguments(run):
    def f(a, b):
        a.add_(1)
        return a * b

    def twice(v):
        return g(v, v * 1)

    g = run.wrap(f)
    yield run(twice, V)


@case("tracing")
def result_is_an_argument(run):
    f = run.wrap(lambda v: (v, v.view(2, 2), v))
    yield run(f, V)


@case("tracing")
def result_is_a_constant(run):
    w = torch.ones(4)
    f = run.wrap(lambda v: (w, v))
    first = run(f, V)
    yield first
    w.mul_(3)
    yield first if not run.is_torch else (torch.ones(4), V)  # JAX arrays never change


@case("tracing")
def result_that_torch_keeps_and_writes(run):
    kept: list[torch.Tensor] = []

    def f(v):
        y = v * 2
        if not kept:
            return y
        return y + 1

    g = run.wrap(f)
    yield run(g, V)


@case("tracing")
def complex_gradient(run):
    yield run.grad(run.wrap(lambda v: (torch.complex(v, v * 2) ** 3).abs()), V)


@case("tracing")
def expanded_and_strided_arguments(run):
    f = run.wrap(lambda m: torch.as_strided(m, (2, 2), (1, 2)))
    yield run(f, torch.arange(6.0).reshape(2, 3))


@case("tracing")
def contiguity_is_torch_s(run):
    yield run(run.wrap(lambda m: m * 2 if m.T.is_contiguous() else m * 3), torch.arange(6.0).reshape(2, 3))


@case("tracing")
def warp_of_a_batch_by_one_grid(run):
    m = torch.arange(6.0).reshape(2, 3)
    yield run.vmap(run.wrap(lambda row: (row * m).sum(0)), torch.ones(4, 3))


@case("tracing", isolated=True)
def grid_sample_of_a_batch_of_images(run):
    generator = torch.Generator().manual_seed(0)
    grid = torch.rand(2, 4, 4, 2, generator=generator) * 1.6 - 0.8
    images = torch.rand(3, 2, 3, 4, 4, generator=generator)

    def f(images):
        return F.grid_sample(images, grid, align_corners=True)

    yield run.vmap(run.wrap(f), images)


@case("tracing", isolated=True)
def grid_sample_of_one_image_by_many_grids(run):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(3, 2, 3, 4, 4, generator=generator)
    grids = torch.rand(2, 4, 4, 2, generator=generator) * 1.6 - 0.8
    g = run.wrap(lambda g, im: F.grid_sample(im, g, align_corners=True))
    yield run.either(
        lambda: torch.stack([g(grids, im) for im in images]),
        lambda: jax.vmap(g, (None, 0))(jnp.asarray(grids.numpy()), jnp.asarray(images.numpy())),
    )


@case("tracing", "xla")
def view_at_a_place_of_data_returned_after_a_write(run):
    def f(v):
        w = v * 1
        part = w[..., v.argmin()]
        w[0] = -1.0
        return part

    yield run(run.wrap(f), V)
    yield run.vmap(run.wrap(f), ROWS)


@case("tracing")
def item_at_a_place_of_data_returned_before_a_write(run):
    def f(v):
        w = v * 1
        part = w[v.argmin()] * 2
        w[0] = -1.0
        return part + w

    yield run(run.wrap(f), V)
    yield run.vmap(run.wrap(f), ROWS)


@case("tracing")
def forward_derivative_of_a_part_of_logcumsumexp(run):
    f = run.wrap(lambda v: v.logcumsumexp(0) * torch.tensor([0.0, 1.0, 0.0, 2.0]))
    yield run.jacfwd(f, V)
    yield run.grad(f, V)
