"""Connectionist temporal classification (CTC): the loss over all alignments of a label sequence, and its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from torch import fx

from jtbridge.lowerings._common import out_shape
from jtbridge.lowerings._registry import register_lowering

Lengths = Sequence[int] | jax.Array


@dataclasses.dataclass(frozen=True)
class _Alignment:
    """A batch of label sequences as states: the labels, with a blank before, between and after them."""

    log_probs: jax.Array  # (time, sample, class)
    states: jax.Array  # (sample, state): the class of each state
    may_skip: jax.Array  # (sample, state): whether the state may follow the second state before it
    last: jax.Array  # (sample, 1): the index of the last state
    input_lengths: jax.Array  # (sample,)

    @property
    def number(self) -> jax.Array:
        return jnp.arange(self.states.shape[1])[None, :]

    def emissions(self) -> jax.Array:
        """Return the log probability of each state's class: (time, sample, state)."""
        return jax.vmap(lambda frame: jnp.take_along_axis(frame, self.states, axis=1))(self.log_probs)


def _alignment(log_probs: jax.Array, targets: jax.Array, inputs: Lengths, lengths: Lengths, blank: int, states: int):
    lengths = jnp.asarray(lengths, jnp.int32)
    labels = _targets_by_sample(targets.astype(jnp.int32), lengths, (states - 1) // 2)
    number = jnp.arange(states)[None, :]
    of_state = jnp.where(number % 2 == 1, jnp.repeat(labels, 2, axis=1, total_repeat_length=states), blank)
    if labels.shape[1] == 0:
        of_state = jnp.full((lengths.shape[0], states), blank, jnp.int32)
    last = 2 * lengths[:, None]
    of_state = jnp.where(number <= last, of_state, blank)
    before = jnp.pad(of_state, ((0, 0), (2, 0)), constant_values=blank)[:, :states]
    may_skip = (number % 2 == 1) & (number > 2) & (of_state != before)
    return _Alignment(log_probs, of_state, may_skip, last, jnp.asarray(inputs, jnp.int32))


def _targets_by_sample(targets: jax.Array, lengths: jax.Array, longest: int) -> jax.Array:
    """Return the targets as (sample, label). They are given in this form, or as one row of all samples' labels."""
    if targets.ndim == 2:
        return targets[:, :longest]
    starts = jnp.cumsum(lengths) - lengths
    index = starts[:, None] + jnp.arange(longest)[None, :]
    return targets[jnp.clip(index, 0, max(targets.shape[0] - 1, 0))]


def _log_sum(*terms: jax.Array) -> jax.Array:
    largest = jnp.maximum(jnp.maximum(terms[0], terms[1]), terms[2])
    shift = jnp.where(largest == -jnp.inf, 0, largest)
    return jnp.log(sum(jnp.exp(term - shift) for term in terms)) + shift


def _shifted_states(x: jax.Array, by: int) -> jax.Array:
    """Return the value of the state `by` places before each state (after it if `by` is negative), or -inf."""
    states = x.shape[1]
    padded = jnp.pad(x, ((0, 0), (max(by, 0), max(-by, 0))), constant_values=-jnp.inf)
    return padded[:, :states] if by > 0 else padded[:, -by : states - by]


def _forward_log_probs(a: _Alignment) -> jax.Array:
    """Return the log probability of the frames up to a time, ending in each state: (time, sample, state)."""
    emissions = a.emissions()
    exists = a.number <= a.last

    def step(before: jax.Array, emission: jax.Array) -> tuple[jax.Array, jax.Array]:
        skipping = jnp.where(a.may_skip, _shifted_states(before, 2), -jnp.inf)
        now = jnp.where(exists, _log_sum(before, _shifted_states(before, 1), skipping) + emission, -jnp.inf)
        return now, now

    first = jnp.where(exists & (a.number < 2), emissions[0], -jnp.inf)
    _, later = jax.lax.scan(step, first, emissions[1:])
    return jnp.concatenate([first[None], later])


def _backward_log_probs(a: _Alignment) -> jax.Array:
    """Return the log probability of the frames from a time on, starting in each state: (time, sample, state)."""
    emissions = a.emissions()
    exists = a.number <= a.last
    # Whether a path may skip from a state to the second state after it.
    may_skip = jnp.pad(a.may_skip, ((0, 0), (0, 2)))[:, 2:]

    def step(after: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        emission, time = now
        skipping = jnp.where(may_skip, _shifted_states(after, -2), -jnp.inf)
        inside = _log_sum(after, _shifted_states(after, -1), skipping) + emission
        ending = jnp.where(a.number >= a.last - 1, emission, -jnp.inf)
        value = jnp.where((time == a.input_lengths - 1)[:, None], ending, inside)
        value = jnp.where(exists & (time < a.input_lengths)[:, None], value, -jnp.inf)
        return value, value

    nothing = jnp.full(a.states.shape, -jnp.inf, emissions.dtype)
    return jax.lax.scan(step, nothing, (emissions, jnp.arange(emissions.shape[0])), reverse=True)[1]


@register_lowering("_ctc_loss", "_ctc_loss.Tensor", node=True)
def _ctc_loss(
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    zero_infinity: bool = False,
    *,
    node: fx.Node,
) -> tuple[jax.Array, jax.Array]:
    del zero_infinity  # the operators after this one replace infinite losses
    return _loss_and_log_alpha(log_probs, targets, input_lengths, target_lengths, blank, out_shape(node, 1)[2])


@register_lowering("jtbridge::ctc_loss")
def _own_ctc_loss(
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int,
    longest: int,
    zero_infinity: bool,
) -> tuple[jax.Array, jax.Array]:
    del zero_infinity
    return _loss_and_log_alpha(log_probs, targets, input_lengths, target_lengths, blank, 2 * longest + 1)


def _loss_and_log_alpha(
    log_probs: jax.Array, targets: jax.Array, input_lengths: Lengths, target_lengths: Lengths, blank: int, states: int
) -> tuple[jax.Array, jax.Array]:
    a = _alignment(log_probs, targets, input_lengths, target_lengths, blank, states)
    log_alpha = jnp.swapaxes(_forward_log_probs(a), 0, 1)
    end = jnp.clip(a.input_lengths - 1, 0)[:, None, None]
    final = jnp.take_along_axis(log_alpha, end, axis=1)[:, 0]
    ends = jnp.where((a.number <= a.last) & (a.number >= a.last - 1), final, -jnp.inf)
    loss = -jax.nn.logsumexp(ends, axis=1)
    nothing = jnp.where(a.last[:, 0] == 0, 0, jnp.inf).astype(loss.dtype)
    loss = jnp.where(a.input_lengths == 0, nothing, loss)
    return jnp.where(_fit(a, targets, jnp.asarray(target_lengths)), loss, jnp.nan), log_alpha


def _fit(a: _Alignment, targets: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return whether all lengths are possible; torch raises otherwise."""
    fit = jnp.all((a.input_lengths >= 0) & (a.input_lengths <= a.log_probs.shape[0])) & jnp.all(lengths >= 0)
    return fit & (jnp.sum(lengths) == targets.size if targets.ndim == 1 else jnp.all(lengths <= targets.shape[1]))


@register_lowering("_ctc_loss_backward", "_ctc_loss_backward.Tensor", "jtbridge::ctc_loss_backward")
def _ctc_loss_backward(
    grad: jax.Array,
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: Lengths,
    target_lengths: Lengths,
    neg_log_likelihood: jax.Array,
    log_alpha: jax.Array,
    blank: int,
    zero_infinity: bool = False,
) -> jax.Array:
    """Return the gradient with respect to the scores of which `log_probs` is the log-softmax.

    Torch returns this gradient too: it assumes that the log probabilities are a log-softmax.
    """
    a = _alignment(log_probs, targets, input_lengths, target_lengths, blank, log_alpha.shape[2])
    log_alpha = jnp.swapaxes(log_alpha, 0, 1)
    impossible = neg_log_likelihood == jnp.inf
    log_posterior = log_alpha + _backward_log_probs(a) - a.emissions() + neg_log_likelihood[:, None]
    # Only existing states are counted: for the others, `log_alpha` may hold any value.
    exists = a.number <= a.last
    posterior = _by_class(jnp.where(exists, jnp.exp(log_posterior), 0), a)
    unknown = impossible[:, None] | (log_probs == -jnp.inf)
    slope = jnp.where(unknown, jnp.nan, jnp.exp(log_probs) - posterior) * grad[:, None]
    if zero_infinity:
        slope = jnp.where(impossible[:, None], 0, slope)
    slope = jnp.where(_fit(a, targets, jnp.asarray(target_lengths)), slope, jnp.nan)
    inside = jnp.arange(log_probs.shape[0])[:, None, None] < a.input_lengths[None, :, None]
    return jnp.where(inside, slope, 0).astype(log_probs.dtype)


def _by_class(values: jax.Array, a: _Alignment) -> jax.Array:
    """Return the sum of the values of the states of each class: (time, sample, class)."""

    def of_sample(rows: Any, classes: Any) -> jax.Array:
        return jnp.zeros((a.log_probs.shape[2], rows.shape[0]), rows.dtype).at[classes].add(rows.T)

    return jnp.transpose(jax.vmap(of_sample, in_axes=(1, 0))(values, a.states), (2, 0, 1))
