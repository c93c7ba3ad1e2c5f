"""Translation of a torch function to a JAX program that computes the same."""

from ._constants import closed_over_bytes, with_constants
from ._linear import nonlinearity
from ._lower import lower_program
from ._operators import OperatorCounts, describe
from ._program import ProgramPart, graph_of, jax_semantics, precision, translate, untranslatable_reason
from ._symbolic import hinted_shapes, is_symbolic, symbolic_program, torch_symbolic

__all__ = [
    "OperatorCounts",
    "ProgramPart",
    "closed_over_bytes",
    "describe",
    "graph_of",
    "hinted_shapes",
    "is_symbolic",
    "jax_semantics",
    "lower_program",
    "nonlinearity",
    "precision",
    "symbolic_program",
    "torch_symbolic",
    "translate",
    "untranslatable_reason",
    "with_constants",
]
