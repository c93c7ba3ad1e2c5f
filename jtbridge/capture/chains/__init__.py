"""Chains of operators as models write them, each as one operator of ours: what a kernel computes at once."""

from ._operators import FUNCTIONS
from ._trail import Chains

__all__ = ["FUNCTIONS", "Chains"]
