"""What the exception of a failed trace says about the function."""

from __future__ import annotations

from jtbridge._compat import DataDependentOutputException, DynamicOutputShapeException
from jtbridge.core.messages import first_line

from ._frames import line_of


def reason_of(cause: Exception) -> str:
    """Return why a function could not be traced, and where in the user's code."""
    operator = str(cause.args[0]) if cause.args else ""
    line = line_of(cause)
    if isinstance(cause, DynamicOutputShapeException):
        text = f"it makes tensors whose sizes depend on the values of its arguments (operator `{operator}`)"
    elif isinstance(cause, DataDependentOutputException) and operator:
        text = f"it needs the values of tensors (operator `{operator}`)"
    else:
        text = first_line(cause) or type(cause).__name__
    return f"{text} ({line})" if line else text


def depends_on_data(cause: Exception | None) -> bool:
    """Return whether an operator needs the values of its arguments, for its result or for the size of the result."""
    return isinstance(cause, DataDependentOutputException | DynamicOutputShapeException)


def reads_memory(cause: Exception | None) -> bool:
    """Return whether torch tried to read the memory of a fake tensor, as in ``torch.tensor([x.sum(), 1])``."""
    return isinstance(cause, RuntimeError) and "its data is not allocated yet" in str(cause)
