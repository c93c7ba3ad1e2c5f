"""Cross entropy of logits is one operator, forward and backward, where it is of class numbers and in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import jtbridge

from .harness import (
    DTYPES,
    assert_matches_torch,
    assert_near,
    assert_not_fused,
    gradient_operators,
    loss,
    normal,
    operators,
    to_torch,
)

ROWS, CLASSES = 6, 7


def arguments(dtype="float32"):
    labels = jnp.asarray([3, -100, 0, 6, 1, -100], jnp.int32)
    return 2 * normal(ROWS, CLASSES, dtype=dtype), labels


def mean(logits, labels):
    return F.cross_entropy(logits.float(), labels)


def total(logits, labels):
    return F.cross_entropy(logits.float(), labels, reduction="sum") / 3


def of_rows(logits, labels):
    return torch.nn.CrossEntropyLoss(reduction="none", ignore_index=0)(logits.float(), labels.clamp_min(0))


def smoothed(logits, labels):
    return F.cross_entropy(logits.to(torch.float32), labels, label_smoothing=0.1)


def smoothed_rows(logits, labels):
    return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=0.2)


def smoothed_sum(logits, labels):
    return F.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=0.2)


def reshaped(logits, labels):
    """As `transformers` has it."""
    logits = logits.reshape(2, 3, CLASSES).float()
    labels = F.pad(labels.reshape(2, 3), (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), ignore_index=-100)


def in_two(logits, labels):
    return F.nll_loss(F.log_softmax(logits.float(), dim=-1), labels)


def weighted(logits, labels):
    return F.cross_entropy(logits.float(), labels, weight=torch.arange(CLASSES) / 4)  # of which one is 0


def weighted_sum(logits, labels):
    return F.cross_entropy(logits.float(), labels, torch.arange(1.0, 1 + CLASSES), reduction="sum")


def weighted_rows(logits, labels):
    loss = torch.nn.CrossEntropyLoss(torch.arange(1.0, 1 + CLASSES), reduction="none", ignore_index=1)
    return loss(logits.float(), labels.clamp_min(0))


def weighted_in_two(logits, labels):
    log_p = F.log_softmax(logits.float(), dim=-1)
    return F.nll_loss(log_p, labels, torch.arange(CLASSES, 0, -1).float())


WEIGHTED = [weighted, weighted_sum, weighted_rows, weighted_in_two]
CHAINS = [mean, total, of_rows, smoothed, smoothed_rows, smoothed_sum, reshaped, in_two, *WEIGHTED]
chains = pytest.mark.parametrize("chain", CHAINS)


@chains
@pytest.mark.parametrize("dtype", DTYPES)
def test_chain_is_fused_and_matches_torch(chain, dtype):
    given = arguments(dtype)
    assert operators(chain, *given) == {"jtbridge.cross_entropy": 1}
    assert dtype == "float32" or f"{dtype} -> float32" not in jtbridge.explain(chain, *given).casts
    both = {"jtbridge.cross_entropy": 1, "jtbridge.cross_entropy_backward": 1}
    gradient = gradient_operators(chain, *given)
    assert gradient["jtbridge.cross_entropy_backward"] == 1
    assert set(gradient) <= set(both)
    assert_matches_torch(chain, *given, second=True)


@chains
def test_every_mode_of_differentiation(chain):
    f, (logits, labels) = loss(jtbridge.wrap(chain, backend="xla")), arguments()
    reverse = jax.jacrev(jax.jacrev(f))(logits, labels)
    forward = jax.jacfwd(jax.jacfwd(f))(logits, labels)
    assert jnp.allclose(reverse, forward, atol=1e-5)
    rows = jnp.stack([logits, logits + 1]), jnp.stack([labels, labels[::-1]])
    y = jax.vmap(jtbridge.wrap(chain, backend="xla"))(*rows)
    assert_near([y], [torch.stack([chain(a, b) for a, b in zip(*to_torch(rows), strict=True)])])


@pytest.mark.parametrize("chain", [mean, smoothed, total, in_two, weighted, weighted_sum])
def test_all_labels_ignored(chain):
    logits, _ = arguments()
    labels = jnp.full(ROWS, -100, jnp.int32)
    f = jtbridge.wrap(chain, backend="xla")
    logits_of_torch, labels_of_torch = to_torch((logits, labels))
    want = chain(logits_of_torch.requires_grad_(), labels_of_torch)
    np.testing.assert_array_equal(f(logits, labels), want.detach())
    (grad,) = torch.autograd.grad(want, logits_of_torch)
    np.testing.assert_array_equal(jax.grad(f)(logits, labels), grad)


def test_logits_that_are_masked():
    def f(logits, labels):
        return mean(logits.masked_fill(torch.arange(CLASSES) == 2, -torch.inf), labels)

    assert_matches_torch(f, *arguments())


# Code that resembles the chain and computes something else.


def weighted_and_smoothed(logits, labels):
    return F.cross_entropy(logits.float(), labels, weight=torch.arange(1.0, 1 + CLASSES), label_smoothing=0.1)


def of_pixels(logits, labels):
    return F.cross_entropy(logits.float().reshape(1, CLASSES, ROWS), labels.reshape(1, ROWS))


def of_one(logits, labels):
    return F.cross_entropy(logits[0].float(), labels[0])


def of_probabilities(logits, labels):
    return F.cross_entropy(logits.float(), (logits.float() / 2).softmax(-1).detach())


def along_rows(logits, labels):
    return F.nll_loss(F.log_softmax(logits.float(), dim=0), labels)


def probabilities_returned(logits, labels):
    log_p = F.log_softmax(logits.float(), dim=-1)
    return F.nll_loss(log_p, labels), log_p


def detached(logits, labels):
    return F.nll_loss(F.log_softmax(logits.float(), dim=-1).detach() + logits.float(), labels)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "function",
    [weighted_and_smoothed, of_pixels, of_one, of_probabilities, along_rows, probabilities_returned, detached],
)
def test_similar_code_is_not_fused(function, dtype):
    assert_not_fused(function, *arguments(dtype))


def test_weights_that_are_arguments():
    def f(logits, labels, weight):
        return F.cross_entropy(logits, labels, weight)

    given = *arguments(), jnp.arange(1.0, 1 + CLASSES)
    g = jtbridge.wrap(f, backend="xla")
    assert "jtbridge.cross_entropy_backward/" in jax.jit(jax.grad(g)).lower(*given).as_text(debug_info=True)
    logits, labels, weight = to_torch(given)
    (want,) = torch.autograd.grad(f(logits.requires_grad_(), labels, weight), logits)
    assert_near([jax.grad(g)(*given)], [want], 4)
    rows = jax.vmap(jax.grad(g), (None, None, 0))(*given[:2], jnp.stack([given[2], given[2][::-1]]))
    (other,) = torch.autograd.grad(f(logits, labels, weight.flip(0)), logits)
    assert_near([rows], [torch.stack([want, other])], 4)


def test_weights_have_no_gradient_as_in_torch():
    """Torch itself raises if such a gradient is requested."""

    def f(logits, labels, weight):
        return F.cross_entropy(logits, labels, weight)

    with pytest.raises(Exception, match="not differentiable with respect to argument 'weight'"):
        jax.grad(jtbridge.wrap(f, backend="xla"), 2)(*arguments(), jnp.arange(1.0, 1 + CLASSES))


def test_half_precision_is_not_fused():
    assert_not_fused(F.cross_entropy, *arguments("bfloat16"))


def test_log_softmax_without_gradient():
    def f(logits, labels):
        with torch.no_grad():
            log_p = F.log_softmax(logits.float(), dim=-1)
        return F.nll_loss(log_p, labels) * logits.float().sum()

    assert_not_fused(f, *arguments(), forward=True)


def test_backward_saves_two_numbers_per_row():
    """The backward does not run the forward again, and no softmax is saved."""
    from jtbridge.capture import split_or_reason

    traced, _ = jtbridge.wrap(mean, backend="xla").prepared(arguments(), {})
    found = split_or_reason(traced, (0,), (0,), translated=True)
    assert not isinstance(found, str)
    kept = [y.shape for y in found.forward.out_types[1:]]
    assert (ROWS, 2) in kept
    assert (ROWS, CLASSES) not in kept
    targets = [str(node.target) for node in found.backward.module.graph.nodes]  # type: ignore[attr-defined]
    assert "jtbridge.cross_entropy_backward.default" in targets
    assert "jtbridge.cross_entropy.default" not in targets
