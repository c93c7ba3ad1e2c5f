"""Functions that get the tokens of `jtbridge.generate` one after another."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import ArgumentError

pytest.importorskip("transformers")
from . import language_models
from .language_models import net_of, prompts

pytestmark = language_models.IGNORED_WARNINGS


def test_stream_gets_all_tokens_in_order_and_may_stop_generation():
    _, net, params, state = net_of(language_models.llama)
    come: list[np.ndarray] = []
    tokens = jtbridge.generate(net, params, state, prompts(5), max_new_tokens=8, stream=come.append)
    np.testing.assert_array_equal(np.stack(come, 1), np.asarray(tokens)[:, 5:])

    def three(step: np.ndarray) -> bool:
        come.append(step)
        return len(come) == 3

    come.clear()
    ended = np.asarray(jtbridge.generate(net, params, state, prompts(5), max_new_tokens=8, stream=three))
    assert len(come) == 3
    np.testing.assert_array_equal(ended[:, :8], np.asarray(tokens)[:, :8])
    assert (ended[:, 8:] == 0).all()


@pytest.mark.parametrize("true", [np.True_, np.array(True), torch.tensor(True)], ids=["NumPy", "array", "tensor"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_stream_ends_only_on_a_true_value(true: Any, is_inside: bool):
    _, net, params, state = net_of(language_models.llama)

    def steps(answer: Any) -> int:
        come: list[np.ndarray] = []

        def stream(step: np.ndarray) -> Any:
            come.append(step)
            return answer

        generate = functools.partial(jtbridge.generate, net, params, state, max_new_tokens=4, stream=stream)
        jax.block_until_ready((jax.jit(generate) if is_inside else generate)(prompts(5)))
        jax.effects_barrier()
        return len(come)

    assert steps(true) == 1
    assert [steps(answer) for answer in (None, 1, np.ones(()), ~true)] == [4, 4, 4, 4]


def test_stream_that_returns_one_value_per_sequence_is_refused():
    _, net, params, state = net_of(language_models.llama)
    with pytest.raises(ArgumentError, match=r"`stream` must return one bool.*of shape \(3,\)"):
        jtbridge.generate(net, params, state, prompts(5), max_new_tokens=4, stream=lambda step: step == 5)


def test_stream_exceptions_propagate_and_the_next_call_works():
    _, net, params, state = net_of(language_models.llama)

    def fail(step: np.ndarray) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        jtbridge.generate(net, params, state, prompts(5), max_new_tokens=8, stream=fail)
    come: list[np.ndarray] = []
    jtbridge.generate(net, params, state, prompts(5), max_new_tokens=8, stream=come.append)
    assert len(come) == 8


def test_a_stream_within_a_program_of_the_user():
    _, net, params, state = net_of(language_models.llama)
    come: list[np.ndarray] = []
    run = jax.jit(lambda params, ids: jtbridge.generate(net, params, state, ids, max_new_tokens=4, stream=come.append))
    tokens = jax.block_until_ready(run(params, prompts(5)))
    jax.effects_barrier()
    np.testing.assert_array_equal(np.stack(come, 1), np.asarray(tokens)[:, 5:])
