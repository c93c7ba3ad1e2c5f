"""Uses of libraries of torch: small modules with random weights, and their arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from .placeholders import torchvision_placeholders


def library(name: str) -> Any:
    """Import a library, or fail: `make test-models` installs all of them."""
    with warnings.catch_warnings(), torchvision_placeholders():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@dataclasses.dataclass(frozen=True)
class Use:
    """One use of a library.

    Attributes:
        library: the name of the library.
        what: the use, in the words of the table in `docs/libraries.md`.
        make: returns the module.
        inputs: the arguments of a call. Gradients by float arguments are compared too.
        called: a part of the reason why `auto` calls the module under `jit`; "" if the module is translated.
    """

    library: str
    what: str
    make: Callable[[], nn.Module]
    inputs: tuple[np.ndarray, ...]
    called: str = ""


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def _integers(below: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, below, shape).astype(np.int32)


class Einops(nn.Module):
    """The functions of einops, with an ellipsis and with packed tensors."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 5))

    def forward(self, x: torch.Tensor) -> Any:
        einops = library("einops")
        split = einops.rearrange(x, "b (h1 h) w c -> b h w (h1 c)", h1=2)
        pooled = einops.reduce(x, "b (h h2) (w w2) c -> b h w c", "max", h2=2, w2=3)
        repeated = einops.repeat(pooled, "b h w c -> b h (w r) c", r=2)
        product = einops.einsum(repeated, self.weight, "b h w c, c d -> b d h w")
        packed, shapes = einops.pack([split, pooled], "b *")
        return product, einops.unpack(torch.tanh(packed), shapes, "b *"), einops.reduce(x, "b ... -> b", "mean")


def einops_layers() -> nn.Module:
    """Rearrange, Reduce and EinMix between torch's own layers."""
    library("einops")
    layers = library("einops.layers.torch")
    return nn.Sequential(
        layers.Rearrange("b h w c -> b c h w"),
        nn.Conv2d(8, 4, 3, padding=1),
        layers.Reduce("b c (h 2) (w 2) -> b c h w", "max"),
        layers.EinMix("b c h w -> b (h w) k", weight_shape="c k", bias_shape="k", c=4, k=6),
    )


def decoder(**options: Any) -> nn.Module:
    """A language model of x-transformers."""
    xt = library("x_transformers")
    layers = xt.Decoder(**{"dim": 32, "depth": 1, "heads": 2, "attn_dim_head": 32} | options)
    return xt.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers)


class MaskedEncoder(nn.Module):
    """An encoder of continuous inputs with a padding mask."""

    def __init__(self):
        super().__init__()
        xt = library("x_transformers")
        layers = xt.Encoder(dim=16, depth=1, heads=2, attn_dim_head=8, rel_pos_bias=True)
        self.model = xt.ContinuousTransformerWrapper(dim_in=8, dim_out=5, max_seq_len=16, attn_layers=layers)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(x, mask=mask)


def language_model_loss() -> nn.Module:
    """Return the training loss of the next token."""
    return library("x_transformers").AutoregressiveWrapper(decoder(rotary_pos_emb=True, attn_flash=True))


def vit(name: str, **options: Any) -> nn.Module:
    """A small model of vit-pytorch."""
    sizes = {"patch_size": 16, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32}
    return getattr(library("vit_pytorch"), name)(image_size=32, **sizes, **options)


def cct() -> nn.Module:
    """A compact convolutional transformer of vit-pytorch."""
    sizes = {"img_size": (32, 32), "embedding_dim": 16, "num_layers": 1, "num_heads": 2, "mlp_ratio": 2.0}
    convolutions = {"n_conv_layers": 1, "kernel_size": 7, "stride": 4, "padding": 3}
    pooling = {"pooling_kernel_size": 3, "pooling_stride": 2, "pooling_padding": 1}
    options = {"num_classes": 5, "positional_embedding": "learnable"}
    return library("vit_pytorch.cct").CCT(**sizes, **convolutions, **pooling, **options)


class VectorField(nn.Module):
    """The right-hand side of an equation: it depends on the time."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(y) * torch.cos(t)


class Flow(nn.Module):
    """Solutions of an ordinary differential equation at fixed times, or at times that the caller passes."""

    def __init__(self, solver: str, method: str, **options: Any):
        super().__init__()
        self.field = VectorField()
        self.solve, self.method, self.options = getattr(library("torchdiffeq"), solver), method, options

    def forward(self, y: torch.Tensor, times: torch.Tensor | None = None) -> torch.Tensor:
        times = torch.linspace(0, 1, 4) if times is None else times
        return self.solve(self.field, y, times, method=self.method, **self.options)


def gaussian_process() -> Any:
    """An exact Gaussian process of gpytorch and its likelihood."""
    gpytorch = library("gpytorch")

    class Process(gpytorch.models.ExactGP):
        def __init__(self, x: torch.Tensor, y: torch.Tensor):
            super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    x = torch.linspace(0, 1, 12)
    return Process(x, torch.sin(6 * x))


@contextlib.contextmanager
def without_checks(chosen: bool) -> Iterator[None]:
    """Let gpytorch not compare values in Python, if chosen."""
    gpytorch, operators = library("gpytorch").settings, library("linear_operator").settings
    with gpytorch.debug(not chosen), gpytorch.trace_mode(chosen), operators.trace_mode(chosen):
        yield


class Evidence(nn.Module):
    """The marginal log likelihood per data point, which training maximizes."""

    def __init__(self, unchecked: bool = False):
        super().__init__()
        self.unchecked = unchecked
        self.process = gaussian_process()
        self.likelihood = library("gpytorch").mlls.ExactMarginalLogLikelihood(self.process.likelihood, self.process)

    def forward(self) -> torch.Tensor:
        self.train()
        with without_checks(self.unchecked):
            return self.likelihood(self.process(*self.process.train_inputs), self.process.train_targets)


class Prediction(nn.Module):
    """Return mean and variance of the observations at new points."""

    def __init__(self):
        super().__init__()
        self.process = gaussian_process()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.train().eval()  # `train` forgets what an earlier prediction computed from other parameters
        observed = self.process.likelihood(self.process(x))
        return observed.mean, observed.variance


class Covariance(nn.Module):
    """A kernel of gpytorch as a matrix."""

    def __init__(self):
        super().__init__()
        kernels = library("gpytorch").kernels
        self.kernel = kernels.ScaleKernel(kernels.MaternKernel(nu=2.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel(x).to_dense()


class SphericalHarmonics(nn.Module):
    """Spherical harmonics up to degree 3."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return library("e3nn.o3").spherical_harmonics([0, 1, 2, 3], x, True, normalization="component")


class TensorProduct(nn.Module):
    """A fully connected tensor product with the spherical harmonics of a vector."""

    def __init__(self):
        super().__init__()
        self.o3 = library("e3nn.o3")
        self.product = self.o3.FullyConnectedTensorProduct("3x0e+2x1o", "1x0e+1x1o", "2x0e+2x1o+1x1e")

    def forward(self, features: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        return self.product(features, self.o3.spherical_harmonics("0e+1o", vectors, True))


class EquivariantLayer(nn.Module):
    """A tensor product with weights from a network, then a linear layer, a gate and norms."""

    def __init__(self):
        super().__init__()
        self.o3, layers = library("e3nn.o3"), library("e3nn.nn")
        irreps = "4x0e+2x1o"
        self.product = self.o3.FullyConnectedTensorProduct("3x0e+2x1o", "1x0e+1x1o", irreps, shared_weights=False)
        self.weights = layers.FullyConnectedNet([4, 8, self.product.weight_numel], nn.functional.silu)
        self.linear = self.o3.Linear(irreps, irreps)
        self.gate = layers.Gate("2x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o")
        self.norm = self.o3.Norm("2x0e+2x1o")

    def forward(self, features: torch.Tensor, vectors: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        harmonics = self.o3.spherical_harmonics("0e+1o", vectors, True)
        return self.norm(self.gate(self.linear(self.product(features, harmonics, self.weights(lengths)))))


NODES, EDGES = 8, _integers(8, 2, 20)
GRAPHS = np.array([0, 0, 0, 1, 1, 1, 1, 1], np.int32)  # the graph of each node


class GraphNetwork(nn.Module):
    """A convolution over a graph, and pooling over each graph of a batch."""

    def __init__(self, convolution: str, pool: str = "global_mean_pool", **options: Any):
        super().__init__()
        layers = library("torch_geometric.nn")
        self.convolution = getattr(layers, convolution)(4, options.pop("width", 6), **options)
        self.out, self.pool = nn.Linear(6, 2), getattr(layers, pool)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, graphs: torch.Tensor) -> torch.Tensor:
        return self.out(self.pool(self.convolution(x, edges).relu(), graphs, 2))


class FixedGraph(GraphNetwork):
    """The same network over one fixed graph that is not an argument."""

    def __init__(self, convolution: str, **options: Any):
        super().__init__(convolution, **options)
        self.edges, self.graphs = EDGES.tolist(), GRAPHS.tolist()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, torch.tensor(self.edges), torch.tensor(self.graphs))


class SchNet(nn.Module):
    """Energy and forces of an interaction block of SchNet. The graph is an argument: making one needs torch_cluster."""

    def __init__(self):
        super().__init__()
        schnet = library("torch_geometric.nn.models.schnet")
        self.embed, self.out = nn.Embedding(10, 6), nn.Linear(6, 1)
        self.smear, self.activation = schnet.GaussianSmearing(0.0, 5.0, 5), schnet.ShiftedSoftplus()
        self.block = schnet.InteractionBlock(6, 5, 6, 5.0)

    def forward(self, numbers: torch.Tensor, positions: torch.Tensor, edges: torch.Tensor) -> Any:
        positions = positions if positions.requires_grad else positions.detach().requires_grad_()
        lengths = (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)
        h = self.embed(numbers)
        h = h + self.block(h, edges, lengths, self.smear(lengths))
        energy = self.out(self.activation(h)).sum()
        return energy, -torch.autograd.grad(energy, positions, create_graph=True)[0]


def timm_model(name: str, **options: Any) -> nn.Module:
    """A model of timm with random weights."""
    return library("timm").create_model(name, **options)


TOKENS = (_integers(50, 2, 12),)
IMAGES = (_normal(2, 3, 32, 32),)
RING = np.stack([np.arange(NODES), (np.arange(NODES) + 1) % NODES]).astype(np.int32)
TIMES = np.linspace(0, 1, 4, dtype=np.float32)
POINTS = np.linspace(0.05, 0.9, 5, dtype=np.float32)
STEPS = {"rtol": 1e-4, "atol": 1e-5}
GRAPH = (_normal(NODES, 4), EDGES, GRAPHS)
VALUES, SIZES = "needs the values of tensors", "sizes depend on the values"

_USES = [
    Use("einops", "`rearrange`, `reduce`, `repeat`, `einsum`, `pack`, `unpack`", Einops, (_normal(2, 4, 6, 8),)),
    Use("einops", "layers: `Rearrange`, `Reduce`, `EinMix`", einops_layers, (_normal(2, 4, 6, 8),)),
    Use("x-transformers", "decoder, rotary embeddings", lambda: decoder(rotary_pos_emb=True), TOKENS),
    Use(
        "x-transformers",
        "decoder, ALiBi, RMSNorm, SwiGLU, grouped queries",
        lambda: decoder(alibi_pos_bias=True, use_rmsnorm=True, ff_glu=True, ff_swish=True, attn_kv_heads=1),
        TOKENS,
    ),
    Use(
        "x-transformers",
        "encoder, relative positions, padding mask",
        MaskedEncoder,
        (_normal(2, 12, 8), np.arange(12) < np.array([[12], [7]])),
    ),
    Use("x-transformers", "`AutoregressiveWrapper`: the loss", language_model_loss, TOKENS),
    Use("vit-pytorch", "`ViT`", lambda: vit("ViT"), IMAGES),
    Use("vit-pytorch", "`SimpleViT`", lambda: vit("SimpleViT"), IMAGES),
    Use("vit-pytorch", "`CCT`", cct, IMAGES),
    Use("torchdiffeq", "`odeint`, RK4, fixed times", lambda: Flow("odeint", "rk4"), (_normal(5, 3),)),
    Use("torchdiffeq", "`odeint_adjoint`, RK4, fixed times", lambda: Flow("odeint_adjoint", "rk4"), (_normal(5, 3),)),
    Use(
        "torchdiffeq",
        "`odeint`, RK4, times as an argument",
        lambda: Flow("odeint", "rk4"),
        (_normal(5, 3), TIMES),
        VALUES,
    ),
    Use("torchdiffeq", "`odeint`, dopri5", lambda: Flow("odeint", "dopri5", **STEPS), (_normal(5, 3),), VALUES),
    Use(
        "torchdiffeq",
        "`odeint_adjoint`, dopri5",
        lambda: Flow("odeint_adjoint", "dopri5", **STEPS),
        (_normal(5, 3),),
        VALUES,
    ),
    Use("gpytorch", "marginal log likelihood of an `ExactGP`", Evidence, (), VALUES),
    Use("gpytorch", "marginal log likelihood without checks of values", lambda: Evidence(unchecked=True), ()),
    Use("gpytorch", "predictions of an `ExactGP`", Prediction, (POINTS,), VALUES),
    Use("gpytorch", "`ScaleKernel(MaternKernel())` as a matrix", Covariance, (_normal(5, 3),)),
    Use("e3nn", "`spherical_harmonics`", SphericalHarmonics, (_normal(5, 3),)),
    Use("e3nn", "`FullyConnectedTensorProduct`", TensorProduct, (_normal(5, 9), _normal(5, 3))),
    Use(
        "e3nn",
        "weights by `FullyConnectedNet`, `Linear`, `Gate`, `Norm`",
        EquivariantLayer,
        (_normal(5, 9), _normal(5, 3), _normal(5, 4)),
    ),
    Use("torch_geometric", "`GCNConv`, `global_mean_pool`", lambda: GraphNetwork("GCNConv"), GRAPH, SIZES),
    Use(
        "torch_geometric",
        "`GCNConv`, `add_self_loops=False`",
        lambda: GraphNetwork("GCNConv", add_self_loops=False),
        GRAPH,
    ),
    Use("torch_geometric", "`GCNConv`, a graph that is no argument", lambda: FixedGraph("GCNConv"), GRAPH[:1]),
    Use("torch_geometric", "`GATConv`", lambda: GraphNetwork("GATConv", width=3, heads=2), GRAPH, SIZES),
    Use(
        "torch_geometric",
        "`GATConv`, `add_self_loops=False`",
        lambda: GraphNetwork("GATConv", width=3, heads=2, add_self_loops=False),
        GRAPH,
    ),
    Use(
        "torch_geometric",
        "`SAGEConv`, largest of the neighbours, `global_max_pool`",
        lambda: GraphNetwork("SAGEConv", "global_max_pool", aggr="max"),
        GRAPH,
    ),
    Use(
        "torch_geometric",
        "interaction block of SchNet, energy and forces",
        SchNet,
        (_integers(9, NODES), _normal(NODES, 3), RING),
    ),
    Use("timm", "`resnet18`", lambda: timm_model("resnet18", num_classes=5), IMAGES),
    Use("timm", "`vit_tiny`", lambda: timm_model("vit_tiny_patch16_224", img_size=32, num_classes=5, depth=2), IMAGES),
    Use("timm", "`convnext_atto`", lambda: timm_model("convnext_atto", num_classes=5, depths=(1, 1, 1, 1)), IMAGES),
    Use("timm", "`test_efficientnet`, features", lambda: timm_model("test_efficientnet", features_only=True), IMAGES),
]
USES = {f"{use.library}: {use.what}": use for use in _USES}
