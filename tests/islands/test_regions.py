"""Regions of translated programs with sizes that depend on data, which torch runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jtbridge
from jtbridge.errors import BackendError, CalledWarning, SequentialVmapWarning, TranslationError
from tests.compare import assert_matches, assert_trees_close

from .programs import CALL, calls_in, scalar

X = np.linspace(-1.0, 1.5, 12, dtype=np.float32).reshape(3, 4)
ROW = X[1]


def tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(x)) for x in arrays]


def around(region: Callable) -> Callable:
    """Return a function that runs a region between other operators, so that most operators are outside of regions."""

    def function(x, *others):
        x = torch.sin(x) * 0.5 + x.cos() * 0.25 + x
        y = region(x, *others)
        y = y if isinstance(y, tuple) else (y,)
        total = torch.stack([(part.float().sin() * 0.5 + 1).sum() for part in y]).sum()
        return (x.sin() * total.sin() + x.cos() * x.sigmoid()).sum(-1)

    return function


# --- values and gradients of many regions ---------------------------------------------------------------------------


def masked_sum(x):
    return x[x > 1].sum()


def masked_mean(x):
    return x[x > 1].mean()


def masked_select(x):
    return torch.masked_select(x, x > 1).cos().sum()


def added_at_positions(x):
    (rows,) = torch.nonzero(x[:, 0] > 1, as_tuple=True)
    return torch.zeros_like(x).index_add(0, rows, x[rows].tanh() * 2)


def written_in_place(x):
    mask, out = x > 1, x.clone()
    out[mask] = out[mask] * 3
    return out


def number_of_values(x):
    return x * torch.unique(x.round()).numel()


def number_of_values_alone(x):
    return x.sum() + torch.tensor(0.0) + torch.scalar_tensor(torch.unique(x.round()).numel())


def repeated(x):
    repeats = (x[:, 0].abs() * 2).long()
    return torch.repeat_interleave(x, repeats, 0).cos().sum(0)


def scattered(x):
    mask = x > 1
    return torch.zeros_like(x).masked_scatter(mask, x[mask] * 2)


def normalised(x):
    return (x[x[:, 0] > 1].softmax(0) * x[:1]).sum(0)


def joined(x):
    return torch.cat([x[x > 1], x.flatten()]).cos().sum()


def counted(x):
    return torch.bincount((x * 2).abs().long().flatten()).max()


def integers(x):
    return torch.nonzero(x > 1).sum(0)


def any_above(x):
    chosen = x[x > 1]
    return (chosen > 2).any(), chosen.sum(), (chosen.long()).sum()


def several_results(x):
    rows = torch.nonzero(x[:, 0] > 1)[:, 0]
    chosen = x[rows]
    return chosen.sum(), chosen.cos().sum(0), torch.zeros_like(x).index_add(0, rows, chosen), rows.sum()


def out_and_back(x):
    chosen = x[x > 1]
    return (chosen * chosen.sum().cos().sin()).sum()


REGIONS = [
    masked_sum,
    masked_mean,
    masked_select,
    added_at_positions,
    written_in_place,
    number_of_values,
    number_of_values_alone,
    repeated,
    scattered,
    normalised,
    joined,
    counted,
    integers,
    any_above,
    several_results,
    out_and_back,
]
# Arguments for which some, all, none or one of the elements are selected.
TAKING = [X, X + 2, X * 0.1 - 3, np.where(X > 1.4, X, np.float32(-3))]


@pytest.mark.parametrize("region", REGIONS, ids=lambda region: region.__name__)
def test_value_and_gradient(region):
    function = around(region)
    f = jtbridge.wrap(function, islands="needed")
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalledWarning)
        text = jax.jit(f).lower(X).as_text()
        program = jax.jit(lambda x: (f(x), jax.grad(lambda x: f(x).sum())(x)))
    assert text.count(CALL) == 1
    for x in TAKING:
        (t,) = tensors(x)
        expected = function(t.requires_grad_())
        (gradient,) = torch.autograd.grad(expected.sum(), t)
        assert_matches(program(x), (expected.detach(), gradient), 1e-4)


# --- transformations ------------------------------------------------------------------------------------------------

F = around(masked_mean)
ABOVE = X + 2  # each row has elements to select


def row(t: torch.Tensor) -> torch.Tensor:
    return F(t).sum()


def rows(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([F(part) for part in t])


TRANSFORMED = {
    "grad": (lambda f: jax.grad(scalar(f)), lambda t: torch.autograd.functional.jacobian(row, t)),
    "jvp": (
        lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
        lambda t: torch.autograd.functional.jvp(F, t, t.cos()),
    ),
    "hessian": (lambda f: jax.hessian(scalar(f)), lambda t: torch.autograd.functional.hessian(row, t)),
    "vmap": (jax.vmap, rows),
    "vmap of vmap": (lambda f: lambda x: jax.vmap(jax.vmap(f))(x[None]), lambda t: rows(t)[None]),
    "vmap of grad": (
        lambda f: jax.vmap(jax.grad(f)),
        lambda t: torch.autograd.functional.jacobian(lambda t: rows(t).sum(), t),
    ),
    "grad of vmap": (
        lambda f: jax.grad(scalar(jax.vmap(f))),
        lambda t: torch.autograd.functional.jacobian(lambda t: rows(t).sum(), t),
    ),
    "scan": (
        lambda f: lambda x: jax.lax.scan(lambda c, row: (c + f(row), f(row)), jnp.float32(0), x),
        lambda t: (rows(t).sum(), rows(t)),
    ),
    "grad of scan": (
        lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, row: (c + f(row), None), jnp.float32(0), x)[0]),
        lambda t: torch.autograd.functional.jacobian(lambda t: rows(t).sum(), t),
    ),
    "checkpoint": (
        lambda f: jax.grad(scalar(jax.checkpoint(f))),
        lambda t: torch.autograd.functional.jacobian(row, t),
    ),
    "checkpoint with a policy": (
        lambda f: jax.grad(scalar(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable))),
        lambda t: torch.autograd.functional.jacobian(row, t),
    ),
    "cond": (lambda f: lambda x: jax.lax.cond(x[0, 0] < 0, lambda y: y.sum(-1), f, x), F),
    "map": (lambda f: lambda x: jax.lax.map(f, x), rows),
}


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.filterwarnings("error::jtbridge.errors.CalledWarning")
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations_match_torch(name):
    ours, theirs = TRANSFORMED[name]
    lowered = jax.jit(ours(jtbridge.wrap(F, islands="needed"))).lower(ABOVE)
    assert lowered.as_text().count(CALL) > 0
    (t,) = tensors(ABOVE)
    assert_matches(lowered.compile()(ABOVE), theirs(t), 1e-4)


def test_batch_is_one_call_that_runs_rows_in_sequence():
    f = jax.vmap(jtbridge.wrap(F, islands="needed"))
    with pytest.warns(SequentialVmapWarning, match="sizes depend on the values"):
        assert calls_in(f, ABOVE) == 1


def test_residuals_have_fixed_sizes_and_backward_has_its_own_region():
    saved, again = (jtbridge.wrap(F, islands="needed", residuals=choice) for choice in ("save", "recompute"))
    counts = [calls_in(jax.grad(scalar(f)), X) for f in (saved, again)]
    assert counts == [2, 1]
    assert_trees_close(jax.jit(jax.grad(scalar(saved)))(X), jax.jit(jax.grad(scalar(again)))(X), 1e-5)


# --- which nodes are in which region --------------------------------------------------------------------------------


def two_regions(x):
    x = torch.sin(x) * 0.5 + x
    first = x[x > 0].sum().cos()
    x = (x * first).tanh() + x.cos() * first.sin()
    return x * x[x > 0.2].mean()


def test_independent_regions_are_two_calls_and_explain_lists_them():
    f = jtbridge.wrap(two_regions, islands="needed")
    assert calls_in(f, X) == 2
    (t,) = tensors(X)
    assert_matches(jax.jit(f)(X), two_regions(t), 1e-5)
    of_value = [island for island in jtbridge.explain(f, X).islands if not island.gradient]
    assert [island.operators for island in of_value] == [
        ("aten.index.Tensor", "aten.sum.default"),
        ("aten.index.Tensor", "aten.mean.default"),
    ]
    assert [(island.inputs, island.results) for island in of_value] == [
        (("float32[3, 4]", "bool[3, 4]"), ("float32[]",))
    ] * 2
    assert [island.bytes for island in of_value] == [12 * 4 + 12 + 4] * 2
    (of_gradient, _) = [island for island in jtbridge.explain(f, X).islands if island.gradient]
    assert of_gradient.operator.startswith("aten.index.Tensor and ")
    assert all(f"{__file__}" in island.reason and "depends on data" in island.reason for island in of_value)


def test_region_includes_operators_between_its_members():
    def function(x):
        x = torch.sin(x) * 0.5 + x.cos() * x.sigmoid() + x.tanh()
        chosen = x[x > 0]
        between = chosen.sum().cos().sin()
        return (chosen * between).sum() * x.cos() + between

    f = jtbridge.wrap(function, islands="needed")
    (island,) = [island for island in jtbridge.explain(f, X).islands if not island.gradient]
    assert {"aten.cos.default", "aten.sin.default"} <= set(island.operators)
    assert "aten.tanh.default" not in island.operators
    assert calls_in(f, X) == 1


def test_layer_norm_inside_a_region_rounds_statistics_as_torch():
    def function(x):
        x = torch.sin(x).bfloat16()
        (rows,) = torch.nonzero(x[:, 0] > 0, as_tuple=True)
        x = torch.nn.functional.layer_norm(x * x[rows].sum(), (4,))
        return x[rows].float().square().sum() + x.float().cos().sum()

    (x,) = (t.requires_grad_() for t in tensors(X))
    (expected,) = torch.autograd.grad(function(x), x)
    f = jtbridge.wrap(function, islands="needed")
    assert jtbridge.explain(f, X).islands
    np.testing.assert_allclose(jax.jit(jax.grad(f))(X), expected, rtol=2e-2, atol=2e-2)


def test_results_of_all_dtypes_and_unused_results():
    def function(x):
        x = torch.sin(x) * 0.5 + x.cos() * x.sigmoid() + x.tanh() * x.exp()
        chosen = x[x > 1]
        values, positions = torch.sort(chosen)
        return (chosen > 2).any(), chosen.numel(), positions.sum(), chosen.sum().double(), values.mean(), x

    f = jtbridge.wrap(function, islands="needed")
    assert calls_in(f, X) == 1
    (t,) = tensors(X)
    flags, number, *others = function(t)
    assert_matches(jax.jit(f)(X), (flags, torch.tensor(number), *others), 1e-5)


class Experts(torch.nn.Module):
    """A transformer block whose tokens are sent to the best two of several experts."""

    def __init__(self, size: int, count: int):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(size) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(size, 3 * size), torch.nn.Linear(size, size)
        self.gate = torch.nn.Linear(size, count)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out((q @ k.T / 4).softmax(-1) @ v)
        h = self.norms[1](x)
        weights, chosen = torch.topk(self.gate(h).softmax(-1), 2)
        mask = torch.nn.functional.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            place, rows = torch.where(mask[number])
            out.index_add_(0, rows, torch.nn.functional.silu(expert(h[rows])) * weights[rows, place, None])
        return x + out


def test_experts_are_one_region_each():
    torch.manual_seed(0)
    block = Experts(8, 5)  # more experts than the tokens need: one gets no token
    t = torch.randn(3, 8)
    x = t.numpy()
    f = jtbridge.wrap(lambda x: block(x), islands="needed")
    text = jax.jit(f).lower(x).as_text()
    assert text.count(CALL) == 5
    assert "stablehlo.dot_general" in text
    program = jax.jit(lambda x: (f(x), jax.grad(lambda x: (f(x) ** 2).sum())(x))).lower(x)
    expected = block(t.requires_grad_())
    (gradient,) = torch.autograd.grad((expected**2).sum(), t)
    assert_matches(program.compile()(x), (expected.detach(), gradient), 1e-4)


def test_graph_attention_that_removes_self_loops():
    geometric = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    layer = geometric.GATConv(4, 3, heads=2)
    edges = np.array([[0, 1, 2, 2, 3, 1], [1, 1, 0, 3, 3, 2]])
    t = torch.randn(4, 4)

    def function(x, edges):
        return layer(torch.sin(x), edges)

    for islands, backend in (("auto", "dlpack"), ("needed", "xla")):
        f = jtbridge.wrap(function, islands=islands)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CalledWarning)
            assert jtbridge.explain(f, t.numpy(), edges).backend == backend
            program = jax.jit(lambda x, f=f: (f(x, edges), jax.grad(lambda x: (f(x, edges) ** 2).sum())(x)))
            found = program(t.numpy())
        x = t.clone().requires_grad_()
        expected = function(x, torch.from_numpy(edges))
        (gradient,) = torch.autograd.grad((expected**2).sum(), x)
        assert_matches(found, (expected.detach(), gradient), 1e-4)


# --- where there are none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("islands", ["auto", "never"])
def test_whole_function_is_called_by_default(islands):
    f = jtbridge.wrap(F, islands=islands)
    with pytest.warns(CalledWarning, match="sizes depend on the values of its arguments"):
        text = jax.jit(f).lower(X).as_text()
    assert "cosine" not in text
    assert text.count(CALL) == 1


def test_explicit_backend_has_regions_only_on_request():
    with pytest.raises(TranslationError, match="sizes depend on the values of its arguments"):
        jax.jit(jtbridge.wrap(F, backend="xla")).lower(X)
    f = jtbridge.wrap(F, backend="xla", islands="needed")
    (t,) = tensors(X)
    assert calls_in(f, X) == 1
    assert_matches(f(X), F(t), 1e-5)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
def test_exported_program_has_no_regions():
    with pytest.raises(TranslationError, match=r"sizes depend on .* \(operator `aten\.nonzero\.default`\)"):
        jtbridge.export(jtbridge.wrap(F), X)
    with pytest.raises(BackendError, match=r"operator `aten\.index\.Tensor` .* depends on data"):
        jax.export.export(jax.jit(jtbridge.wrap(F, islands="needed")))(X)
    lower = jax.jit(jtbridge.wrap(F, backend="xla", islands="needed")).trace(X).lower
    for platforms in (("tpu",), ("cpu", "cuda")):
        with pytest.raises(TranslationError, match=r"operator `aten\.index\.Tensor` .* depends on data"):
            lower(lowering_platforms=platforms)


def test_several_devices_call_the_function_or_run_sharded_regions():
    mesh = Mesh(np.array(jax.devices()[:3]), ("rows",))
    if mesh.size < 3:
        pytest.fail("the tests run on several CPU devices")
    (t,) = tensors(ABOVE)
    sharding = NamedSharding(mesh, PartitionSpec("rows"))
    f = jtbridge.wrap(F, islands="needed")
    with pytest.warns(CalledWarning):
        divided = jax.jit(f, in_shardings=sharding).lower(jax.device_put(ABOVE, sharding))
    assert "cosine" not in divided.as_text()
    assert_matches(divided.compile()(jax.device_put(ABOVE, sharding)), F(t), 1e-5)
    on_shards = jax.shard_map(f, mesh=mesh, in_specs=PartitionSpec("rows"), out_specs=PartitionSpec("rows"))
    assert calls_in(on_shards, ABOVE) == 1
    assert "cosine" in jax.jit(on_shards).lower(ABOVE).as_text()
    assert_matches(jax.jit(on_shards)(ABOVE), torch.cat([F(part[None]) for part in t]), 1e-5)


def test_random_function_is_called():
    def noisy(x):
        return torch.nn.functional.dropout(F(x), 0.5)

    f = jtbridge.wrap(noisy, islands="needed")

    def loss(x):
        return (f(x, rng=jax.random.key(0)) ** 2).sum()

    with pytest.warns(CalledWarning):
        text = jax.jit(loss).lower(X).as_text()
    assert "cosine" not in text
    value, gradient = jax.jit(jax.value_and_grad(loss))(X)
    step = 1e-3 * jnp.cos(X)
    by_steps = (jax.jit(loss)(X + step) - jax.jit(loss)(X - step)) / 2
    np.testing.assert_allclose(jax.jit(loss)(X), value, rtol=1e-6)
    np.testing.assert_allclose((gradient * step).sum(), by_steps, rtol=3e-2, atol=1e-4)


def test_unused_key_does_not_prevent_regions():
    f = jtbridge.wrap(F, islands="needed")
    assert "cosine" in jax.jit(lambda x: f(x, rng=jax.random.key(0))).lower(X).as_text()


def branch_on_a_size(x):
    chosen = x[x > 1]
    return chosen.sum() * x.cos() if chosen.numel() > 2 else x.sin()


def sizes_taken_for_equal(x):  # broadcasts if there is a single element
    return (x[x > 1.4] * x[x < -0.5]).sum() * x.cos()


def checked_size(x):
    chosen = x[x > 1]
    torch._check(chosen.numel() < 12)
    return chosen.sum() * x.cos()


def number(x):
    return x * x.sum().item()


def text_of_a_number(x):
    return x * 2 if f"{x[0, 0].item()}" == "-1.0" else x + x[x > 1].sum()


def caught(x):
    try:
        return x[x > 1].sum() * x[:, torch.nonzero(x[0] > 1)[0, 0]].sum()
    except IndexError:
        return x.cos().sum()


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
@pytest.mark.parametrize(
    "function", [branch_on_a_size, sizes_taken_for_equal, checked_size, number, text_of_a_number, caught]
)
def test_functions_without_a_complete_graph_are_called(function):
    f = jtbridge.wrap(function, islands="needed")
    assert jtbridge.explain(f, X).backend == "dlpack"
    for x in (X, np.where(X < 1.4, X, np.float32(-3)), X * 0.1):
        (t,) = tensors(x)
        try:
            expected = function(t.requires_grad_())
        except RuntimeError:  # of torch, about these sizes
            with pytest.raises(Exception, match="must match the size of tensor"):
                jax.jit(f)(x).block_until_ready()
            continue
        assert_matches(jax.jit(f)(x), expected.detach(), 1e-5)
        (gradient,) = torch.autograd.grad(expected.sum(), t)
        assert_matches(jax.jit(jax.grad(scalar(f)))(x), gradient, 1e-4)
