"""Calls inside a traced program: caches of traced functions, retracing warnings, comparison of first results."""

from ._call import TracedCalls
from ._verify import by_rounding, difference, tolerance
