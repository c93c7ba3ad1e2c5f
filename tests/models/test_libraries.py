"""Libraries of torch through `jtbridge.module` and `jtbridge.wrap`. `make test-models` installs them."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import CalledWarning, DataDependentShapeError, ModelError, SequentialVmapWarning, TranslationError

from .libraries import EDGES, NODES, STEPS, USES, Flow, GraphNetwork, SphericalHarmonics, Use, gaussian_process, library
from .placeholders import placeholders

# Warnings of gpytorch about the example values with which a function is run once to find the shapes of its results.
pytestmark = pytest.mark.filterwarnings("ignore:A not p.d., added jitter")
# XLA makes the same program, but LLVM does not optimise it: this halves the time to compile a program that runs once.
QUICK = {"xla_backend_optimization_level": 0}
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "libraries.md"


def is_float(leaf: Any) -> bool:
    return leaf.is_floating_point() if isinstance(leaf, torch.Tensor) else jnp.issubdtype(leaf.dtype, jnp.floating)


def weights(shape: Any) -> np.ndarray:
    """Return weights for the elements of a result in the loss; a plain sum would hide errors that cancel."""
    return np.cos(np.arange(int(np.prod(shape))) * 0.7).astype(np.float32).reshape(tuple(shape))


def in_torch(model: torch.nn.Module, inputs: tuple[np.ndarray, ...]) -> tuple[list[Any], dict[str, Any]]:
    """Return torch's results, the gradients by parameters (by name), and those by float arguments (by position)."""
    model.eval()
    tensors = [torch.from_numpy(array.copy()) for array in inputs]
    tensors = [tensor.long() if tensor.dtype is torch.int32 else tensor for tensor in tensors]  # as a call gets them
    wanted = dict(model.named_parameters())
    wanted |= {str(i): tensor.requires_grad_() for i, tensor in enumerate(tensors) if is_float(tensor)}
    outs = jax.tree.leaves(model(*tensors))
    loss = sum((out * torch.from_numpy(weights(out.shape))).sum() for out in outs)
    gradients = torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True)
    return outs, dict(zip(wanted, gradients, strict=True))


def in_jax(model: torch.nn.Module, inputs: tuple[np.ndarray, ...], jit: bool) -> tuple[list[Any], dict[str, Any]]:
    """Return the results and the gradients of `jtbridge.module`."""
    net = jtbridge.module(model)
    params, state = net.init()

    def loss(params: Any, inputs: Any, state: Any) -> Any:
        outs = jax.tree.leaves(net(params, state, *inputs)[0])
        return sum((out * weights(out.shape)).sum() for out in outs), outs

    program = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)
    program = jax.jit(program, compiler_options=QUICK) if jit else program
    (_, outs), (by_params, by_inputs) = program(params, tuple(map(jnp.asarray, inputs)), state)
    return outs, by_params | {str(i): g for i, (x, g) in enumerate(zip(inputs, by_inputs, strict=True)) if is_float(x)}


def assert_near(actual: Any, expected: torch.Tensor, tolerance: float, floor: float, where: str) -> None:
    """Compare relative to the largest element, or to `floor` if that is larger."""
    expected = expected.detach().numpy()
    scale = max(float(np.abs(expected).max(initial=0)), floor)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale, err_msg=where)


def assert_same(actual: Any, expected: Any, tolerance: float) -> None:
    """Compare results and gradients. Rounding may make a gradient that is zero nonzero."""
    (outs, gradients), (torch_outs, torch_gradients) = actual, expected
    for out, torch_out in zip(outs, torch_outs, strict=True):
        assert_near(out, torch_out, tolerance, 1e-6, "result")
    assert gradients.keys() == torch_gradients.keys()
    largest = max(float(g.abs().max()) for g in torch_gradients.values())
    assert largest > 1e-3
    for name, gradient in torch_gradients.items():
        assert_near(gradients[name], gradient, 10 * tolerance, 1e-3 * largest, f"gradient by {name}")


@pytest.mark.parametrize("name", USES)
def test_results_and_gradients_match_torch(name: str):
    use = USES[name]
    torch.manual_seed(0)
    model = use.make()
    expected = in_torch(model, use.inputs)
    assert_same(in_jax(model, use.inputs, jit=False), expected, 1e-6)
    warned = pytest.warns(CalledWarning, match=use.called) if use.called else contextlib.nullcontext()
    with warned:
        assert_same(in_jax(model, use.inputs, jit=True), expected, 1e-5)


@pytest.mark.parametrize("name", [name for name, use in USES.items() if use.called])
def test_explain_gives_the_reason_for_a_call(name: str):
    use = USES[name]
    net = jtbridge.module(use.make())
    explanation = jtbridge.explain(net, *net.init(), *map(jnp.asarray, use.inputs))
    assert explanation.backend == "dlpack"
    assert use.called in explanation.reasons["xla"]


def test_documentation_lists_every_case():
    def row(use: Use) -> str:
        return f"| {use.library} | {use.what} | {'called' if use.called else 'translated'} |"

    rows = [line for line in PAGE.read_text().splitlines() if line.endswith(("| translated |", "| called |"))]
    assert rows == [row(use) for use in USES.values()]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_einops_functions_under_vmap(jit: bool):
    einops = library("einops")
    x = np.random.default_rng(0).normal(size=(3, 4, 6, 2)).astype(np.float32)

    @jtbridge.wrap
    def pooled(x: torch.Tensor) -> torch.Tensor:
        return einops.reduce(x, "(h 2) (w 3) c -> h w c", "mean")

    batched = jax.vmap(pooled)
    out = (jax.jit(batched) if jit else batched)(x)
    np.testing.assert_allclose(out, x.reshape(3, 2, 2, 2, 3, 2).mean((2, 4)), atol=1e-6)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_einops_reports_shapes_that_do_not_fit_its_pattern(jit: bool):
    einops = library("einops")
    f = jtbridge.wrap(lambda x: einops.rearrange(x, "(h 2) c -> h (2 c)"))
    with pytest.raises(einops.EinopsError, match="rearrange"):
        (jax.jit(f) if jit else f)(jnp.ones((3, 4)))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_solutions_for_many_initial_values_by_vmap(jit: bool):
    torch.manual_seed(0)
    flow = Flow("odeint", "rk4")
    net = jtbridge.module(flow)
    params, state = net.init()
    starts = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    batched = jax.vmap(lambda y: net(params, state, y)[0])
    # In eager calls torch.vmap refuses the writes of torchdiffeq to its table of solutions.
    with contextlib.nullcontext() if jit else pytest.warns(SequentialVmapWarning):
        out = (jax.jit(batched) if jit else batched)(starts)
    expected = torch.stack([flow(torch.from_numpy(start)) for start in starts])
    assert_near(out, expected, 1e-6, 1.0, "solutions")


def test_an_adaptive_solver_is_not_translated():
    net = jtbridge.module(Flow("odeint", "dopri5", **STEPS), backend="xla")
    with pytest.raises(TranslationError, match="`Flow` cannot be traced: it needs the values of tensors"):
        net(*net.init(), jnp.ones(3))


def test_cached_predictions_of_a_gaussian_process_are_refused():
    process, x = gaussian_process().eval(), torch.linspace(0, 1, 5)
    net = jtbridge.module(process).method(lambda model, x: model.likelihood(model(x)).variance)
    params, state = jtbridge.module(process).init()
    before, _ = net(params, state, jtbridge.to_jax(x))
    np.testing.assert_allclose(before, process.likelihood(process(x)).variance.detach(), rtol=1e-5)
    with pytest.raises(ModelError, match=r"uses the torch module's own `mean_module\.raw_constant`"):
        net(params, state, jtbridge.to_jax(x))
    process.train().eval()
    np.testing.assert_allclose(net(params, state, jtbridge.to_jax(x))[0], before)


def test_jacobians_of_spherical_harmonics():
    net = jtbridge.module(SphericalHarmonics())
    x = np.array([0.3, -0.5, 0.8], np.float32)
    expected = torch.autograd.functional.jacobian(SphericalHarmonics(), torch.from_numpy(x))
    jacobian = jax.jit(jax.jacrev(lambda x: net({}, {}, x)[0]))(x)
    assert_near(jacobian, expected, 1e-5, 1e-6, "jacobian")


def test_graph_of_data_dependent_size_cannot_be_returned():
    loops = library("torch_geometric.utils").remove_self_loops
    edges = jnp.asarray(EDGES)
    without = jtbridge.wrap(lambda edges: loops(edges)[0])
    np.testing.assert_array_equal(without(edges), loops(torch.from_numpy(EDGES))[0])
    with pytest.raises(DataDependentShapeError):
        jax.jit(without)(edges)


def test_a_graph_convolution_over_a_batch_of_features():
    torch.manual_seed(0)
    model = GraphNetwork("GCNConv", add_self_loops=False)
    net = jtbridge.module(model.convolution)
    params, state = net.init()
    x = np.random.default_rng(0).normal(size=(3, NODES, 4)).astype(np.float32)
    out = jax.jit(jax.vmap(lambda x: net(params, state, x, EDGES)[0]))(x)
    expected = torch.stack([model.convolution(torch.from_numpy(rows), torch.from_numpy(EDGES).long()) for rows in x])
    assert_near(out, expected, 1e-6, 1e-6, "convolution")


def test_import_placeholders_are_removed():
    library("timm")
    assert not placeholders()
    assert importlib.util.find_spec("torchvision") is None
