"""The objects that are searched for state, and those that are not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge


class LazyMapping(dict):
    """A dict that loads all its entries on any access, like the mappings of transformers."""

    loaded = 0

    def _load(self, *args: Any) -> Any:
        type(self).loaded += 1
        return 0

    __bool__ = __len__ = __iter__ = __contains__ = keys = values = items = _load  # type: ignore[assignment]


@pytest.mark.parametrize("backend", ["auto", "xla"])
def test_lazy_mapping_is_not_loaded(backend: str):
    mapping = LazyMapping()

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * (1 if mapping is not None else 2)

    LazyMapping.loaded = 0
    assert jax.jit(jtbridge.wrap(f, backend=backend))(jnp.ones(2)).tolist() == [1, 1]
    assert jtbridge.wrap(f, backend=backend)(jnp.ones(2)).tolist() == [1, 1]
    assert LazyMapping.loaded == 0
