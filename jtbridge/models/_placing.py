"""The conversion of a module's tensors to JAX arrays, whole or distributed over a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np
import torch

from jtbridge.core.array_types import is_dense, kind_of_layout
from jtbridge.core.convert import to_jax
from jtbridge.core.dtypes import canonical_dtype, numpy_dtype
from jtbridge.errors import ArgumentError, ModelError

from ._layout import TensorEntry
from ._sharding import Leaf, Rules, shardings_of, with_sharding


def converter(
    found: Mapping[str, TensorEntry], mesh: jax.sharding.Mesh | None, rules: Rules | None
) -> Callable[[str, torch.Tensor], jax.Array]:
    """Return a function that converts a tensor, given by its name and value, to a JAX array."""
    if (mesh is None) != (rules is None):
        raise ArgumentError("`mesh` and `rules` are given together: `init(mesh=mesh, rules=...)`.")
    for entry in found.values():
        if not is_dense(entry.tensor):
            kind, dense = kind_of_layout(entry.tensor)
            raise ModelError(
                f"`{entry.name}` {kind}, which JAX does not have. Store {dense} in the module. Code that needs "
                "another layout can convert it in each call."
            )
    shardings = {}
    if mesh is not None and rules is not None:
        leaves = [
            Leaf(entry.name, tuple(entry.tensor.shape), entry.kind in ("parameter", "frozen"))
            for entry in found.values()
        ]
        shardings = dict(zip(found, shardings_of(leaves, mesh, rules), strict=True))

    def convert(name: str, tensor: torch.Tensor) -> jax.Array:
        if tensor.device.type == "meta":
            raise ModelError(
                f'`{name}` is on torch\'s device "meta", so it has no values, and no file has them. Make the module on '
                "the CPU, or with `accelerate.init_empty_weights()`, which gives values to buffers."
            )
        _check_range(name, tensor)
        return with_sharding(tensor, shardings[name]) if shardings else to_jax(tensor)

    return convert


def _check_range(name: str, tensor: torch.Tensor) -> None:
    """Raise an error for 64-bit integers that JAX would truncate to 32 bits, because x64 is off."""
    wide = numpy_dtype(tensor.dtype, f"`{name}`")
    narrow = canonical_dtype(wide)
    if wide == narrow or wide.kind not in "iu" or not tensor.numel():
        return
    values, limits = tensor.detach().cpu().numpy(), np.iinfo(narrow)
    lost = values[(values < limits.min) | (values > limits.max)]
    if lost.size:
        raise ModelError(
            f"`{name}` has the value {lost[0]}, but while x64 is off JAX has only 32-bit integers, which "
            'cannot hold it. Turn x64 on, `jax.config.update("jax_enable_x64", True)`, before the first array is made.'
        )
