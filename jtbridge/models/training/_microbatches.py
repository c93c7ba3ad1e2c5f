"""Parts of a batch, whose gradients are added up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jtbridge.errors import ArgumentError


def microbatches(batch: Any, count: int) -> Any:
    """Return the batch with a new leading axis of `count` microbatches.

    Microbatch i has the rows i, i + count, i + 2 * count, ...: then each has rows of every device if the first axis of
    the batch is sharded.

    Raises:
        ArgumentError: an array has no batch axis, the arrays differ in its length, or `count` does not divide it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    lengths = {jax.tree_util.keystr(path) or "batch": leaf.shape[0] if leaf.ndim else None for path, leaf in leaves}
    if None in lengths.values() or len(set(lengths.values())) != 1:
        raise ArgumentError(
            "With `accumulate=`, the first axis of every array of the batch is the batch axis, and all have the same "
            f"length. These have {', '.join(f'{name}: {length}' for name, length in lengths.items())}."
        )
    (length,) = set(lengths.values())
    if not length or length % count:
        raise ArgumentError(
            f"`accumulate={count}` must divide the batch, which has {length} rows. Leave out the rest of the rows, or "
            "choose another number."
        )
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(length // count, count, *x.shape[1:]), 0, 1), batch)


def check_metrics(metrics: dict[str, Any]) -> None:
    """Refuse a metric that has no mean over microbatches."""
    for name, value in metrics.items():
        for leaf in jax.tree.leaves(value):
            if jnp.ndim(leaf) or not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise ArgumentError(
                    f"The metric `{name}` is {jax.typeof(leaf).str_short()}, and with `accumulate=` metrics are "
                    "averaged over the microbatches. Return a floating-point scalar that is a mean over the rows."
                )
