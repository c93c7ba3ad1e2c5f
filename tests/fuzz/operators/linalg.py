"""Linear algebra on square matrices that are far from singular."""

from __future__ import annotations

from tests.fuzz.programs import NoChoice, Writer

# A square well-conditioned matrix {w}, made of a float variable.
_LINALG: list[tuple[str, ...]] = [
    ("torch.linalg.inv({w})",),
    ("torch.linalg.det({w})",),
    ("torch.linalg.slogdet({w})[1]",),
    ("torch.logdet({w} @ {w}.mT)",),
    ("torch.linalg.solve({w}, {x})",),
    ("torch.linalg.solve({w}, {x}, left=False)",),
    ("torch.linalg.cholesky({w} @ {w}.mT)",),
    ("torch.linalg.eigvalsh({w} + {w}.mT)", "distinct(torch.linalg.eigvalsh({w} + {w}.mT), -1)"),
    ("torch.linalg.svdvals({w})", "distinct(torch.linalg.svdvals({w}), -1)"),
    ("torch.linalg.qr({w})[1]",),
    ("torch.linalg.qr({w}).Q",),
    ("torch.matrix_exp({w} * 0.2)",),
    ("torch.linalg.pinv({w})",),
    ("torch.linalg.matrix_norm({w})",),
    ("torch.linalg.matrix_norm({w}, 'nuc')", "distinct(torch.linalg.svdvals({w}), -1)"),
    ("torch.linalg.solve_triangular({w}, {x}, upper=True)",),
    ("torch.linalg.solve_triangular({w}, {x}, upper=False, unitriangular=False)",),
    ("torch.cholesky_solve({x}, torch.linalg.cholesky({w} @ {w}.mT))",),
    ("torch.linalg.lu_factor({w})[0]",),
    ("torch.linalg.lu({w})[2]",),
    ("torch.linalg.matrix_power({w} * 0.2, -2) * 0.01",),
    ("torch.cholesky_inverse(torch.linalg.cholesky({w} @ {w}.mT))",),
    ("torch.linalg.eigh({w} + {w}.mT)[0]", "distinct(torch.linalg.eigvalsh({w} + {w}.mT), -1)"),
    (
        "torch.linalg.eigh({w} + {w}.mT)[1].abs()",
        "distinct(torch.linalg.eigvalsh({w} + {w}.mT), -1)",
        "away(torch.linalg.eigh({w} + {w}.mT)[1], 0)",
    ),
    ("torch.linalg.inv_ex({w})[0]",),
    ("torch.linalg.cond({w}, 'fro')",),
    ("torch.linalg.tensorinv({w}.unsqueeze(0), 2)",),
    ("torch.linalg.lstsq({w}, {x})[0]",),
    ("torch.linalg.householder_product({w} * 0.1, {w}.diagonal() * 0.1)",),
    ("torch.triu({w}) @ {x}",),
    ("torch.linalg.vander({w}.diagonal() * 0.3)",),
]


def linear_algebra(w: Writer) -> None:
    x = w.real(at_least=2)
    size = w.shape(x)[-2]
    source = w.rng.choice([f"{x}.sin()", f"torch.tanh({x})"])
    product = f"{source} @ {source}.mT" if w.shape(x)[-1] != size else source
    matrix = w.let(f"torch.eye({size}, dtype={x}.dtype) * {2 * size + 1.5} + {product}")
    expression, *guards = (part.format(w=matrix, x=x) for part in w.rng.choice(_LINALG))
    if guards:  # they are evaluated before the statement, when there is no matrix yet
        raise NoChoice
    w.let(expression)


def square_matrix(w: Writer) -> None:
    """Return a matrix for the next operator, with eigenvalues and singular values that differ."""
    x = w.pick(lambda x: x.is_floating_point() and x.ndim >= 2 and x.shape[-1] == x.shape[-2])
    size = w.shape(x)[-1]
    diagonal = [round(3.0 + 1.7 * i, 2) for i in range(size)]
    w.let(f"torch.diag(torch.tensor({diagonal}, dtype={x}.dtype)) + 0.2 * {x}.tanh()")


def of_square_matrix(w: Writer) -> None:
    x = w.pick(
        lambda x: (
            x.is_floating_point()
            and x.ndim >= 2
            and x.shape[-1] == x.shape[-2] > 1
            and bool((x.diagonal(dim1=-2, dim2=-1) > 2).all())
        )
    )
    row = w.rng.choice(_LINALG)
    expression, *guards = (part.format(w=x, x=w.real(at_least=1)) for part in row)
    w.let(expression, f"conditioned({x})", *guards)
