"""Eager calls: torch itself runs on the arrays of the caller, and its autograd gives the derivatives.

`README.md` in this folder explains the design.
"""

from ._arrays import shared_tensor, unshareable_reason
from ._call import call_now
from ._direct import call_directly

__all__ = ["call_directly", "call_now", "shared_tensor", "unshareable_reason"]
