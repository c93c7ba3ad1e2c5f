"""State that a function writes in some of its branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge
from jtbridge.errors import MutationError

X = jnp.asarray([1.0, 2.0, 4.0])


class Linked:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def writes_on_one_branch(x: torch.Tensor, written: list) -> torch.Tensor:
    if x.sum() > 0:
        written.append(1)
    return x


def writes_on_the_other_branch(x: torch.Tensor, written: list) -> torch.Tensor:
    if x.sum() > 0:
        return x
    written.append(1)
    return x * 2


def writes_a_size_that_depends_on_data(x: torch.Tensor, written: list) -> torch.Tensor:
    n = x[x > 0].shape[0]
    if n > 1:
        written.append(n)
    return x


def writes_where_branches_differ_in_shape(x: torch.Tensor, written: list) -> torch.Tensor:
    if x.sum() > 0:
        written.append(1)
    return (x if x.sum() > 0 else x[:1]).sum()


def writes_an_object_that_refers_to_itself(x: torch.Tensor, written: list) -> torch.Tensor:
    written.append(Linked())
    return x


@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack", "callback"])
@pytest.mark.parametrize(
    "fn",
    [
        writes_on_one_branch,
        writes_on_the_other_branch,
        writes_a_size_that_depends_on_data,
        writes_where_branches_differ_in_shape,
        writes_an_object_that_refers_to_itself,
    ],
)
def test_write_on_any_branch_is_refused(fn: Callable[..., Any], backend: str):
    written: list[Any] = []
    with pytest.raises(MutationError, match="written"):
        jax.jit(jtbridge.wrap(lambda x: fn(x, written), backend=backend))(X)
    assert written == []


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_cache_filled_on_one_branch_is_stored(backend: str):
    cache: dict[str, torch.Tensor] = {}

    def fn(x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            return x * 2
        if "ones" not in cache:
            cache["ones"] = torch.ones(3)
        return x * cache["ones"]

    f = jax.jit(jtbridge.wrap(fn, backend=backend))
    assert f(X).tolist() == [1, 2, 4]
    assert f(-X).tolist() == [-2, -4, -8]
    assert cache["ones"].tolist() == [1, 1, 1]
