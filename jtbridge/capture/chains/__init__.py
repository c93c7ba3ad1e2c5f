"""FusionPatterns of operators as models write them, each as one operator of ours: what a kernel computes at once."""

from ._operators import FUNCTIONS
from ._recorder import FusionPatterns

__all__ = ["FUNCTIONS", "FusionPatterns"]
