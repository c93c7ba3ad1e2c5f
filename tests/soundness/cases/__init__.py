"""The cases, by section. Importing this package fills `CASES`."""

from . import shapes, state_read, state_written, threads, tools, tracing
from ._case import CASES, Case

__all__ = ["CASES", "Case", "shapes", "state_read", "state_written", "threads", "tools", "tracing"]
