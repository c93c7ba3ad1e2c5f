"""Run one case with torch, or with jtbridge, and say whether the two agree."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jtbridge
from tests import reference
from tests.compare import as_numpy, assert_close, jax_dtype

WAYS = [("eager", "auto"), *[("jit", name) for name in ("auto", "xla", "dlpack", "callback")]]


class Torch:
    """Plain torch, whose results are the reference."""

    is_torch = True

    def wrap(self, function: Callable[..., Any], **options: Any) -> Any:
        """The function itself."""
        return function

    def __call__(self, function: Any, *args: Any, **keywords: Any) -> Any:
        """Return the result of a call; the caller's tensors are not written to."""
        args, keywords = _copied((args, keywords))
        return function(*args, **keywords)

    def grad(self, function: Any, *xs: torch.Tensor) -> Any:
        """Return the gradient of the sum of a function's result, for each argument."""
        leaves = reference.leaves_of_graph(xs)
        y = function(*(x.clone() for x in leaves))
        return reference.gradients([y], leaves, [torch.ones_like(y)])

    def jacfwd(self, function: Any, x: torch.Tensor) -> Any:
        """Return the Jacobian by rows, with torch's backward. Zeros may have other signs than in forward mode."""
        return reference.jacobian(lambda x: [function(x)], [x])[0][0] + 0.0

    def vmap(self, function: Any, *xs: torch.Tensor) -> Any:
        """A loop over the rows."""
        rows = [function(*(x.clone() for x in row)) for row in zip(*xs, strict=True)]
        return torch.stack(rows)

    def drawn(self, function: Any, *args: Any) -> Any:
        """Return the result of a function that draws from torch's generator, after seeding it."""
        torch.manual_seed(7)
        return function(*args)

    def either(self, of_torch: Callable[[], Any], of_jax: Callable[[], Any]) -> Any:
        """Return the reference for a tool that only JAX has, computed in another way by torch."""
        return of_torch()

    def beside(self, other: Callable[[], Any], main: Callable[[], Any]) -> Any:
        """Return the result of a function on another thread."""
        return other()

    def fails(self, function: Any, *args: Any) -> Any:
        """Return whether a call that must fail does so."""
        try:
            self(function, *args)
        except Exception:  # noqa: BLE001 - any error is one
            return torch.tensor(True)
        return torch.tensor(False)


class Bridge:
    """jtbridge, eagerly or through a new `jax.jit` for each use."""

    is_torch = False

    def __init__(self, mode: str, backend: str):
        self._mode = mode
        self._backend = backend

    def wrap(self, function: Callable[..., Any], **options: Any) -> Any:
        return jtbridge.wrap(function, backend=self._backend, **options)

    def _use(self, function: Callable[..., Any], args: Any) -> Any:
        leaves, rebuilt = _flat(args)
        arrays = [jnp.asarray(as_numpy(x)) for x in leaves]

        def use(*arrays: Any) -> Any:
            return function(*rebuilt(arrays))

        return jax.block_until_ready((jax.jit(use) if self._mode == "jit" else use)(*arrays))

    def __call__(self, function: Any, *args: Any, **keywords: Any) -> Any:
        return self._use(lambda args, keywords: function(*args, **keywords), (args, keywords))

    def grad(self, function: Any, *xs: torch.Tensor) -> Any:
        gradient = jax.grad(lambda *xs: function(*xs).sum(), tuple(range(len(xs))))
        return list(self._use(gradient, xs))

    def jacfwd(self, function: Any, x: torch.Tensor) -> Any:
        return self._use(jax.jacfwd(function), (x,)) + 0.0

    def vmap(self, function: Any, *xs: torch.Tensor) -> Any:
        return self._use(jax.vmap(function), xs)

    def drawn(self, function: Any, *args: Any) -> Any:
        torch.manual_seed(7)
        return self(function, *args)

    def either(self, of_torch: Callable[[], Any], of_jax: Callable[[], Any]) -> Any:
        return jax.block_until_ready((jax.jit(of_jax) if self._mode == "jit" else of_jax)())

    def beside(self, other: Callable[[], Any], main: Callable[[], Any]) -> Any:
        results: list[Any] = []
        finished = threading.Event()

        def thread() -> None:
            results.append(other())
            finished.set()

        worker = threading.Thread(target=thread)
        worker.start()
        while not finished.is_set():
            main()
        worker.join()
        return results[0]

    def fails(self, function: Any, *args: Any) -> Any:
        """Return whether a call raises, or gives NaN or the least integer, as a compiled program does instead."""
        try:
            found = np.asarray(self(function, *args))
        except Exception:  # noqa: BLE001 - any error is one
            return torch.tensor(True)
        if found.dtype.kind == "f":
            return torch.tensor(bool(np.isnan(found).any()))
        return torch.tensor(bool((found == np.iinfo(found.dtype).min).any()))


def outcome(case: Any, mode: str, backend: str, isolated: bool = False) -> tuple[str, str]:
    """Return "right", "refused", "wrong" or "crashed", and the reason."""
    if case.isolated and not isolated:
        return _in_a_child(case, mode, backend)
    with _restored_torch_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = [_frozen(y) for y in case.script(Torch())]
    with _restored_torch_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = 0
        try:
            for found, actual in enumerate(case.script(Bridge(mode, backend))):
                text = _difference(actual, expected[found])
                if text:
                    return "wrong", f"result {found}: {text}"
        except jtbridge.errors.TorchCallError as error:
            return "crashed", f"{type(error).__name__}: {error}"
        except jtbridge.errors.JtbridgeError as error:
            return "refused", f"{type(error).__name__}: {error}"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what is raised is the outcome
            return "crashed", f"{type(error).__name__}: {error}"
        if found + 1 != len(expected):
            return "wrong", f"{found + 1} results, torch has {len(expected)}"
    return "right", ""


def _in_a_child(case: Any, mode: str, backend: str) -> tuple[str, str]:
    command = [sys.executable, "-m", "tests.soundness", "--isolated", case.name, mode, backend]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    for line in child.stdout.splitlines():
        if line.startswith('["'):
            kind, text = json.loads(line)
            return kind, text
    return "crashed", f"the process ended with {child.returncode}"


def _difference(actual: Any, expected: Any) -> str | None:
    ours, theirs = jax.tree.leaves(actual), jax.tree.leaves(expected)
    if len(ours) != len(theirs):
        return f"{len(ours)} leaves, torch has {len(theirs)}"
    for x, y in zip(ours, theirs, strict=True):
        if not isinstance(y, torch.Tensor):
            if isinstance(x, jax.Array) or type(x) is not type(y) or x != y:
                return f"{x!r}, torch has {y!r}"
            continue
        dtype = jax_dtype(y.dtype)
        if isinstance(x, torch.Tensor):
            x = jnp.asarray(as_numpy(x))
        if x.shape != tuple(y.shape) or x.dtype != dtype:
            return f"{x.dtype}{list(x.shape)}, torch has {dtype}{list(y.shape)}"
        try:
            right = as_numpy(y)
            assert_close(x, right, 2e-5)  # NaN where NaN is
            if right.dtype.kind == "f":  # also compare the signs of zeros
                zero = (np.asarray(x) == 0) & (right == 0)
                np.testing.assert_array_equal(np.signbit(np.asarray(x))[zero], np.signbit(right)[zero])
        except AssertionError:
            return f"{np.asarray(x).tolist()}, torch has {y.tolist()}"
    return None


def _flat(tree: Any) -> tuple[list[torch.Tensor], Callable[[Any], Any]]:
    """Return the tensors of nested containers, and a function that rebuilds the containers with the same key order."""
    leaves: list[torch.Tensor] = []

    def index(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            leaves.append(x)
            return _Place(len(leaves) - 1)
        return _mapped(index, x)

    places = index(tree)

    def rebuilt(arrays: Any) -> Any:
        def fill(x: Any) -> Any:
            return arrays[x.number] if isinstance(x, _Place) else _mapped(fill, x)

        return fill(places)

    return leaves, rebuilt


class _Place:
    def __init__(self, number: int):
        self.number = number


def _mapped(function: Callable[[Any], Any], x: Any) -> Any:
    if type(x) is dict:
        return {key: function(value) for key, value in x.items()}
    if type(x) in (list, tuple):
        return type(x)(map(function, x))
    return x


def _copied(tree: Any) -> Any:
    return tree.clone() if isinstance(tree, torch.Tensor) else _mapped(_copied, tree)


def _frozen(tree: Any) -> Any:
    return tree.detach().clone() if isinstance(tree, torch.Tensor) else _mapped(_frozen, tree)


@contextlib.contextmanager
def _restored_torch_state() -> Iterator[None]:
    state, dtype, grad = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
