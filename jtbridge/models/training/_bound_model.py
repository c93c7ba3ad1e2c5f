"""A module with its parameters and state, as the loss of a training step calls it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jtbridge._compat import current_trace
from jtbridge.errors import ModelError
from jtbridge.models._module import Arrays, JaxModule


class BoundModel:
    """The module with the parameters, the state and the key of one step: the first argument of a loss.

    ``model(*args)`` returns only the module's result. Changes of the state are kept for the next call. Each call
    draws from its own key.

    Attributes:
        net: the :class:`jtbridge.JaxModule`.
        params: the parameters, with respect to which the gradient is taken.
        state: the state after the calls so far. A loss that calls `net` itself assigns ``model.state |= changed``.
    """

    def __init__(self, net: JaxModule, params: Arrays, state: Arrays, key: Any, train: bool | None, dtype: Any):
        self.net = net
        self.params = params
        self.state = dict(state)
        self._key = key
        self._keys = 0  # the number of keys that were given out
        self._train = train
        self._dtype = dtype
        self._trace = current_trace()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's ``forward`` and return its result."""
        return self._call("forward", args, kwargs)

    def method(self, name: str) -> Callable[..., Any]:
        """Return another method of the module, which is called like the model itself."""
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    def key(self) -> jax.Array:
        """Return a new key: for a loss that draws random numbers, and for ``model(x, rng=key)``.

        Raises:
            ModelError: it is called inside ``scan``, ``vmap`` or ``checkpoint``, where each iteration would get the
                same key.
        """
        if current_trace() is not self._trace:
            raise ModelError(
                "`model.key()` was called inside `scan`, `vmap`, `checkpoint` or another function of JAX, where each "
                "iteration would get the same key. Take it outside, and split it: "
                "`keys = jax.random.split(model.key(), n)`."
            )
        self._keys += 1
        return jax.random.fold_in(self._key, self._keys)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_nested = current_trace() is not self._trace
        # The same key in each iteration of a loop would give the same dropout mask: without a key, a draw is refused.
        options = {"train": self._train, "rng": None if is_nested else self.key(), **kwargs}
        call = self.net if method == "forward" else self.net.method(method)
        if self._dtype is None:
            out, changed = call(self.params, self.state, *args, **options)
        else:
            with _autocast(self._dtype):
                out, changed = call(self.params, self.state, *args, **options)
            out = jax.tree.map(lambda leaf: _back_in_float32(leaf, self._dtype), out)
            for name, value in changed.items():
                if name in self.state:
                    changed[name] = value.astype(self.state[name].dtype)
        if is_nested and changed:
            raise ModelError(
                f"`{self.net.__name__}` changes its state ({', '.join(sorted(changed)[:6])}) in a call inside `scan`, "
                "`vmap`, `checkpoint` or another function of JAX, so the loss cannot keep the change. Return it from "
                "that function: `out, changed = model.net(model.params, model.state, x, train=True, rng=key)`, and "
                "assign `model.state |= changed` after it."
            )
        self.state |= changed
        return out


@contextlib.contextmanager
def _autocast(dtype: Any):
    # Torch's cache of converted weights is off: it would keep tensors of one trace for the next one.
    with torch.autocast("cpu", dtype=getattr(torch, jnp.dtype(dtype).name), cache_enabled=False):
        yield


def _back_in_float32(leaf: Any, dtype: Any) -> Any:
    return leaf.astype(jnp.float32) if getattr(leaf, "dtype", None) == dtype else leaf
