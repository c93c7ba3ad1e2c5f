"""A function with one island, its arguments, and the number of calls of torch in a program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .operators import around, bent

X = jnp.linspace(-1.0, 1.5, 12).reshape(3, 4)
T = torch.tensor(np.asarray(X))
F = around(bent, 0.5)
PLAIN = around(lambda x, by: x**3 * by, 0.5)  # torch.func does not differentiate custom operators
CALL = "@xla_buffer_python_cpu_callback"


def calls_in(function, *args) -> int:
    return jax.jit(function).lower(*args).as_text().count(CALL)


def scalar(f):
    return lambda x: f(x).sum()


def sharded(x):
    mesh = Mesh(np.array(jax.devices()[:4]), ("rows",))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec("rows")))
