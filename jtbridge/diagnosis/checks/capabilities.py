"""The capabilities of jtbridge, each proven by a small run whose value is known."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import PartitionSpec

from jtbridge._backends import backends
from jtbridge.calls._wrap import wrap
from jtbridge.core.backend_names import CALLING, WITHOUT_KERNELS
from jtbridge.diagnosis._checks import Check, WrongValue, expect
from jtbridge.diagnosis._report import NOTE, OK, Finding
from jtbridge.models import module

_GROUP = "capabilities"
_FIX = "Report it with this whole report; until then choose another backend by `backend=`."
_X = np.linspace(0.1, 1.5, 6, dtype=np.float32).reshape(2, 3)
_VALUE, _GRADIENT = np.sin(_X) * _X, np.cos(_X) * _X + np.sin(_X)
_SECOND = 2 * np.cos(_X) - _X * np.sin(_X)


def _sin_times_x(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * x


def _sum_of_results(f: Callable[..., Any]) -> Callable[[Any], jax.Array]:
    return lambda x: f(x).sum()


def _try_jit(backend: str) -> None:
    expect(jax.jit(wrap(_sin_times_x, backend=backend))(_X), _VALUE)


def _try_grad(backend: str) -> None:
    expect(jax.jit(jax.grad(_sum_of_results(wrap(_sin_times_x, backend=backend))))(_X), _GRADIENT)


def _try_vmap(backend: str) -> None:
    f = wrap(_sin_times_x, backend=backend)
    expect(jax.jit(jax.vmap(f))(_X), _VALUE)
    expect(jax.jit(jax.vmap(jax.grad(_sum_of_results(f))))(_X), _GRADIENT)


def _try_second_derivative(backend: str) -> None:
    f = _sum_of_results(wrap(_sin_times_x, backend=backend))
    expect(jax.jit(jax.grad(lambda x: jax.grad(f)(x).sum()))(_X), _SECOND, 1e-4)


def _try_scan(backend: str) -> None:
    f = wrap(_sin_times_x, backend=backend)
    _, ys = jax.lax.scan(lambda carry, x: (carry, f(x)), 0, jnp.asarray(_X))
    expect(ys, _VALUE)


def _try_exception(backend: str) -> None:
    def fails_below_zero(x: torch.Tensor) -> torch.Tensor:
        if bool((x < 0).any()):
            raise LookupError("below zero")
        return _sin_times_x(x)

    f = jax.jit(wrap(fails_below_zero, backend=backend))
    try:
        jax.block_until_ready(f(-_X))
    except Exception as error:
        if "below zero" not in str(error):
            raise
    else:
        raise WrongValue("an exception of the function did not reach the caller")
    expect(f(_X), _VALUE)  # the next call works


def _try_island() -> None:
    from jtbridge.translate import forced_islands

    f = wrap(lambda x: torch.sin(x) * x + 1, backend=WITHOUT_KERNELS, islands="needed")
    with forced_islands(lambda node: "sin" in str(node.target)):
        program = jax.jit(f).lower(_X)
    if "xla_buffer_python" not in program.as_text():
        raise WrongValue("the program does not call torch")
    expect(program.compile()(_X), _VALUE + 1)


def _try_shards() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("i",))
    f = wrap(_sin_times_x)
    run = jax.shard_map(f, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"))
    expect(jax.jit(run)(_X), _VALUE)


def _try_random_numbers() -> None:
    f = jax.jit(wrap(lambda x: torch.nn.functional.dropout(x, 0.5)))
    x, key = jnp.ones(1000), jax.random.key(0)
    first = f(x, rng=key)
    expect(first, f(x, rng=key))
    share = float((first == 0).mean())
    if not 0.4 < share < 0.6:
        raise WrongValue(f"dropout of one half dropped {share:.0%}")


def _try_module() -> None:
    net = module(torch.nn.Linear(3, 2))
    params, state = net.init()
    weight, bias = params["weight"], params["bias"]
    out, _ = jax.jit(net)(params, state, jnp.asarray(_X))
    expect(out, _X @ np.asarray(weight).T + np.asarray(bias), 1e-4)


def _try_mutation() -> None:
    x = jnp.asarray(_X)
    expect(jax.jit(wrap(lambda x: x.add_(1)))(x), _X + 1)
    expect(x, _X)


# The functions to run in the child process "calls", and in "programs", by the names of their checks.
_CALLS: dict[str, Callable[[], None]] = {
    "eager call": lambda: expect(wrap(_sin_times_x)(jnp.asarray(_X)), _VALUE),
    "eager gradient": lambda: expect(jax.grad(_sum_of_results(wrap(_sin_times_x)))(jnp.asarray(_X)), _GRADIENT),
    "eager vmap": lambda: expect(jax.vmap(wrap(_sin_times_x))(jnp.asarray(_X)), _VALUE),
}
_PROGRAMS: dict[str, Callable[[], None]] = {
    "island": _try_island,
    "shard_map on CPU devices": _try_shards,
    "random numbers": _try_random_numbers,
    "module": _try_module,
    "mutation": _try_mutation,
}
_KINDS: dict[str, Callable[[str], None]] = {
    "jit": _try_jit,
    "grad": _try_grad,
    "vmap": _try_vmap,
    "second derivative": _try_second_derivative,
    "scan": _try_scan,
}
for _name, _run in _KINDS.items():
    _PROGRAMS[f"{_name}, translated"] = functools.partial(_run, WITHOUT_KERNELS)
for _backend in CALLING:
    for _name, _run in {**_KINDS, "exception": _try_exception}.items():
        _CALLS[f"{_name}, called by {_backend}"] = functools.partial(_run, _backend)


def _try_capability(name: str, run: Callable[[], None]) -> Sequence[Finding]:
    reasons = {status.name: status.reason for status in backends() if not status.available}
    backend = name.partition("called by ")[2]
    if backend in reasons:
        return [Finding(_GROUP, name, NOTE, f"not tried: {reasons[backend]}")]
    run()
    return [Finding(_GROUP, name, OK, "runs, and its value is right")]


CHECKS = tuple(
    Check(_GROUP, name, functools.partial(_try_capability, name, run), process, _FIX)
    for process, runs in (("calls", _CALLS), ("programs", _PROGRAMS))
    for name, run in runs.items()
)
