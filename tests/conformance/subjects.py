"""The libraries under test: each turns a torch function of tensors into a JAX function of arrays.

A subject is named on the command line: one of jtbridge's backends, a peer, or ``module:attribute`` for another.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, Protocol

import jax
import torch

from .convert import shape_of
from .trees import leaves, rebuilt


class Subject(Protocol):
    """Adapts one library. `name` is its name in reports and in the list of known failures.

    `translates`: the library computes without torch, so its rounding differs (see :mod:`.exactness`).
    """

    name: str
    translates: bool

    def wrap(
        self, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], output: Any | None
    ) -> Callable[..., Any]:
        """Return `function` as a JAX function, to be called as ``f(*arrays)`` or ``f(*arrays, rng=key)``.

        `tensors` are example inputs, for libraries that want them. `output` is torch's output for them where
        the output's shape cannot be known without the data, else None.
        """
        ...


class Jtbridge:
    """jtbridge with one of its backends, as a user calls it: without `output_shapes`."""

    def __init__(self, backend: str):
        import jtbridge

        self.name = backend
        self.translates = backend not in ("dlpack", "callback")
        self._wrap = jtbridge.wrap

    def wrap(
        self, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], output: Any | None
    ) -> Callable[..., Any]:
        return self._wrap(function, backend=self.name)


class WrapTorch2Jax:
    """The peer wrap-torch2jax, differentiable to the depth that the modes need. It has no random keys."""

    name = "wrap-torch2jax"
    translates = False

    def __init__(self) -> None:
        # Builds a C++ extension when it is first imported, with ninja, which must be on the PATH.
        from wrap_torch2jax import torch2jax_with_vjp

        self._wrap = torch2jax_with_vjp

    def wrap(
        self, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], output: Any | None
    ) -> Callable[..., Any]:
        shapes = None if output is None else rebuilt(output, shape_of)
        wrapped = self._wrap(function, *tensors, depth=2, output_shapes=shapes)

        def call(*arrays: jax.Array, rng: jax.Array | None = None) -> Any:
            return wrapped(*arrays)

        return call


class Torchax:
    """The peer torchax, which runs torch functions on JAX arrays. Its environment holds the random key."""

    name = "torchax"
    translates = True

    def __init__(self) -> None:
        # Renames a device of torch when it is imported.
        from torchax import default_env, interop

        self._environment = default_env
        self._view = interop.jax_view

    def wrap(
        self, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], output: Any | None
    ) -> Callable[..., Any]:
        def call(*arrays: jax.Array, rng: jax.Array | None = None) -> Any:
            outputs: list[Any] = []

            # torchax supports only JAX's containers, which torch's named tuples are not.
            def flat(*inner: torch.Tensor) -> list[torch.Tensor]:
                outputs.append(function(*inner))
                return [leaf for leaf in leaves(outputs[-1]) if isinstance(leaf, torch.Tensor)]

            with self._environment() as environment, contextlib.ExitStack() as stack:
                if rng is not None:
                    stack.enter_context(environment.override_property(prng=rng))
                results = iter(self._view(flat)(*arrays))
            return rebuilt(outputs[-1], lambda _: next(results))

        return call


PEERS: dict[str, Callable[[], Subject]] = {WrapTorch2Jax.name: WrapTorch2Jax, Torchax.name: Torchax}
BACKENDS = ("dlpack", "callback", "xla", "triton", "auto")


def subject(name: str) -> Subject:
    """Return the subject of a name; every worker process makes its own."""
    if name in BACKENDS:
        return Jtbridge(name)
    if name in PEERS:
        return PEERS[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"Unknown backend `{name}`. Known: {', '.join((*BACKENDS, *PEERS))}, module:class.")
    return getattr(importlib.import_module(module), attribute)()
