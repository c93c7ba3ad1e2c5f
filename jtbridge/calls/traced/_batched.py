"""The positions of the arguments that ``batched=`` names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jtbridge.core.array_types import ArrayType
from jtbridge.errors import ArgumentError, ShardingError


def batched_inputs(
    function: str,
    batched: Sequence[str],
    parameters: Sequence[str],
    names: Sequence[str],
    in_types: Sequence[ArrayType],
    out_types: Sequence[ArrayType],
) -> tuple[int, ...]:
    """Return the positions of the array arguments that have the batch axis.

    Args:
        function: the name of the function.
        batched: the names of its arguments with a batch axis.
        parameters: the names of the function's parameters.
        names: the names of all arrays among the arguments, such as ``params['w']``.
        in_types, out_types: the types of these arrays, and of the results.

    Raises:
        ArgumentError: `batched` names an argument that does not exist, or only arguments without arrays.
        ShardingError: a batched array or a result has no first axis, or one of another size than the others.
    """
    if not batched:
        return ()
    roots = [re.split(r"[.\[]", name, maxsplit=1)[0] for name in names]
    unknown = [name for name in batched if name not in roots and name not in parameters]
    if unknown or not any(name in roots for name in batched):
        raise ArgumentError(
            f"`batched` of `{function}` names `{[*unknown, *batched][0]}`, which has no arrays in this call. "
            f"Name one of {', '.join(f'`{name}`' for name in dict.fromkeys(roots))}."
        )
    positions = tuple(i for i, root in enumerate(roots) if root in batched)
    rows = in_types[positions[0]].shape[:1]
    found = [(f"argument `{names[i]}`", in_types[i]) for i in positions]
    for what, type_ in [*found, *((f"result {i}", type_) for i, type_ in enumerate(out_types))]:
        if type_.shape[:1] != rows or not rows:
            size = f"of {rows[0]} rows like argument `{names[positions[0]]}`" if rows else "of rows"
            raise ShardingError(
                f"`{function}` is wrapped with `batched=`, so each of its results and batched arguments must have a "
                f"first axis {size}, but {what} has shape {type_.shape}. Reduce over the rows outside of the function."
            )
    return positions
