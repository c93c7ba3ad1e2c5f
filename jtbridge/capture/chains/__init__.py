"""Chains of operators as models write them. Each is replaced by one fused operator, which a kernel computes."""

from ._operators import FUNCTIONS
from ._recorder import CallRecorder
