"""Activation functions, at their kinks and where exponentials overflow, and in half precision."""

import pytest
import torch
import torch.nn.functional as F

from .harness import check

NAN, INF = float("nan"), float("inf")
KINKS = torch.tensor([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, 20.0, 21.0, -21.0, 100.0, -100.0, 0.1, -0.1])

FUNCTIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "elu alpha": lambda x: F.elu(x, alpha=0.3),
    "celu": lambda x: F.celu(x, alpha=2.0),
    "selu": F.selu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "hardtanh": lambda x: F.hardtanh(x, -0.1, 3),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "softplus": F.softplus,
    "softplus beta": lambda x: F.softplus(x, beta=2.0, threshold=6.0),
    "logsigmoid": F.logsigmoid,
    "softshrink": lambda x: F.softshrink(x, 0.1),
    "hardshrink": lambda x: F.hardshrink(x, 0.1),
    "tanhshrink": F.tanhshrink,
    "threshold": lambda x: F.threshold(x, 0.1, -5.0),
    "sigmoid": torch.sigmoid,
    "softsign": F.softsign,
    "rrelu": F.rrelu,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name):
    check(FUNCTIONS[name], KINKS, grad=True)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("elu alpha", "softplus beta")])
def test_half_precision(name):
    check(FUNCTIONS[name], KINKS.bfloat16(), grad=True)


@pytest.mark.parametrize("name", ["relu", "hardtanh", "silu", "sigmoid"])
def test_infinities(name):
    check(FUNCTIONS[name], torch.tensor([INF, -INF]))


def test_nan_propagates():
    check(lambda x: [function(x) for function in FUNCTIONS.values()], torch.full((3,), NAN))


def test_activations_of_integers():
    check(lambda x: (F.relu(x), F.relu6(x), torch.sigmoid(x)), torch.tensor([-3, 0, 2, 9]))
    check(F.relu, torch.tensor([0, 200], dtype=torch.uint8))


def test_complex_gates():
    x = torch.tensor([0j, 1 + 2j, -3 - 1j])
    check(lambda x: (torch.sigmoid(x), F.silu(x), torch.tanh(x)), x)
    check(lambda x, y: torch.sigmoid(torch.complex(x, y)).abs(), torch.randn(3), torch.randn(3), grad=True)


def test_logits_outside_of_their_domain():
    x = torch.tensor([NAN, 0.0, 1.0, 0.3, -0.5, 1.5, 0.01])
    check(lambda *xs: [torch.logit(x, eps) for x in xs for eps in (None, 0.1)], x, x.bfloat16())
    check(lambda x: torch.logit(x, 0.1), torch.tensor([0.2, 0.05, 0.95]), grad=True)


@pytest.mark.parametrize("eps", [None, -0.1, 0.0, 0.2])
def test_gradients_of_logits_outside_of_their_domain(eps):
    """The gradient of NaN is NaN. A negative bound is ignored."""
    x = torch.tensor([NAN, 0.0, 1.0, 0.3, -0.5, 1.5, 0.01])
    check(lambda x: torch.logit(x, eps), x, grad=True)
    check(lambda x: torch.logit(x, eps), x.double(), grad=True)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gated_linear_units(dim):
    check(lambda x: F.glu(x, dim), torch.randn(4, 2, 6), grad=True)


def test_learned_slopes():
    check(F.prelu, torch.tensor([[0.0, -1.0], [2.0, -3.0]]), torch.tensor([0.25, 0.5]), grad=True)
    check(F.prelu, torch.tensor(-2.0), torch.tensor([0.25]), grad=True)


def test_in_place_activations_use_results_in_their_derivatives():
    def function(x):
        return [
            f(x * 1)
            for f in (torch.celu_, torch.relu_, lambda y: F.elu(y, inplace=True), lambda y: F.leaky_relu(y, 0.2, True))
        ]

    check(function, torch.tensor([-2.0, -0.5, 0.0, 1.5]), grad=True)


@pytest.mark.parametrize("name", ["hardtanh", "relu6", "hardshrink", "softshrink", "elu", "celu", "selu", "hardswish"])
def test_gradient_at_nan_matches_vectorized_torch(name):
    # Torch gives a different gradient for the few elements after the last whole vector.
    check(getattr(F, name), torch.full((64,), NAN), grad=True)
