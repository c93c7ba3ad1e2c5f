"""Translation of a torch function to a JAX program that computes the same."""

from ._choice import choose_runner
from ._constants import closed_over_bytes, with_constants
from ._costs import Workload, workload_of
from ._islands import forced_islands, island_of, islands_in, torch_island_p
from ._linear import nonlinear_reason
from ._lower import lower_program
from ._operators import OperatorCounts
from ._program import ProgramPart, precision, translate, untranslatable_reason
from ._symbolic import example_shapes, is_symbolic, symbolic_program, torch_symbolic
