"""Gather, scatter and similar operators."""

from __future__ import annotations

import math

from tests.fuzz.programs import Writer


def indexed(w: Writer) -> None:
    """Write a gather, a scatter or a similar operator, with literal indices."""
    x = w.real(at_least=1)
    shape = w.shape(x)
    dim = w.rng.randrange(len(shape))
    size = shape[dim]
    some = w.integers(3, size)
    unique = w.integers(min(2, size), size, unique=True)
    signed = [i - size if w.rng.random() < 0.4 else i for i in some]
    inside = [slice(None)] * dim
    colons = ":, " * len(inside)
    count = math.prod(shape)
    column = ", ".join("-1" if i == dim else "1" for i in range(len(shape)))
    wanted = ", ".join("3" if i == dim else str(n) for i, n in enumerate(shape))
    index = f"torch.tensor({some}).reshape({column}).expand({wanted})"
    copies = f"torch.cat([{x}] * 3, {dim})"
    first = f"{copies}.narrow({dim}, 0, 3)"
    one = f"torch.tensor({unique[:1]}).expand({', '.join('1' for _ in shape)})"
    w.let(
        w.rng.choice(
            [
                f"{x}[{colons}{signed}]",
                f"{x}[{colons}torch.tensor({signed})]",
                f"{x}.index_select({dim}, torch.tensor({some}))",
                f"{x}.gather({dim}, {index})",
                f"torch.take_along_dim({x}, {index}, {dim})",
                f"{x}.take(torch.tensor({w.integers(4, count)}))",
                f"{x}.scatter({dim}, {one}, {w.number()})",
                f"{x}.scatter_add({dim}, {index}, {copies})",
                f"{x}.scatter_reduce({dim}, {index}, {copies}.sin(), 'mean')",
                f"{x}.scatter_reduce({dim}, {index}, {copies} + 0.3, 'prod', include_self=False)",
                f"{x}.index_add({dim}, torch.tensor({some}), {first}, alpha=0.5)",
                f"{x}.index_copy({dim}, torch.tensor({unique}), {x}.narrow({dim}, 0, {len(unique)}) * 2)",
                f"{x}.index_fill({dim}, torch.tensor({unique}), 0.7)",
                f"{x}.select_scatter({x}.select({dim}, 0) * 2, {dim}, -1)",
                f"{x}.slice_scatter({x}.narrow({dim}, 0, 1) + 1, {dim}, 0, 1)",
                f"{x}.diagonal_scatter({x}.diagonal() * 3)",
                f"{x}.index_put((torch.tensor({w.integers(3, shape[0])}),), {x}[:1] * 2, accumulate=True)",
                f"{x}.masked_fill(torch.arange({shape[-1]}) % 2 == 0, 0.25)",
                f"{x}[torch.arange({shape[0]}) % 2 == 0]",
                f"{x}[{colons}[True] + [False] * {size - 1}]",
                f"{x}[torch.arange({shape[0]}), 0]",
                f"{x}[[0, -1]][:, [0]]",
                f"{x}[{colons}None, {signed[0]}]",
                f"{x}[[[0, -1], [0, 0]]]",
                f"{x}[[0, -1], ..., [0, -1]]",
                f"{x}[0:1, ..., [0, -1, 0]]",
                f"torch.index_reduce({x}, {dim}, torch.tensor({some}), {first}.cos(), 'mean')",
            ]
        )
    )
