"""What a benchmark hands back: a row of numbers, or of reasons why there is none."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

TORCH = "torch"
DLPACK = "jtbridge dlpack"
CALLBACK = "jtbridge callback"
TORCH2JAX = "wrap-torch2jax"
BY_HAND = "pure_callback"
TORCHAX = "torchax"
COLUMNS = (DLPACK, CALLBACK, TORCH2JAX, BY_HAND, TORCHAX, TORCH)

# The targets are for what a user gets without asking for a backend.
JUDGED = DLPACK


@dataclass(frozen=True)
class Failed:
    """Why a contestant has no number."""

    reason: str

    @classmethod
    def from_error(cls, error: BaseException) -> "Failed":
        """The line that says most: JAX puts the whole traceback from a callback into the message."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip(" -")]
        text = next((line for line in reversed(lines) if "Error" in line), lines[0] if lines else "")
        return cls(f"{type(error).__name__}: {text}"[:200])


Cell = float | Failed
Calls = dict[str, Callable[[], Any] | Failed]


@dataclass
class Row:
    """One line of the table.

    `target` is the largest ratio to the contestant `against`, or without `against` the largest value.
    """

    key: str
    title: str
    unit: str
    cells: dict[str, Cell]
    against: str | None = None
    target: float | None = None
    notes: list[str] = field(default_factory=list)

    def ratio(self, name: str) -> float | None:
        """How many times the value of `against`; None where one of the two has no number."""
        cell, base = self.cells.get(name), self.cells.get(self.against or "")
        return cell / base if isinstance(cell, float) and isinstance(base, float) and base > 0 else None

    def verdict(self) -> str:
        """The target, and whether the judged contestant met it in this run."""
        if self.target is None:
            return ""
        if self.against:
            wanted, got = f"<= {self.target:.2f}x of {self.against}", self.ratio(JUDGED)
        else:
            cell = self.cells.get(JUDGED)
            wanted, got = f"<= {self.target:g} {self.unit}", cell if isinstance(cell, float) else None
        return wanted if got is None else f"{wanted}: {'yes' if got <= self.target else 'no'}"


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    quick: bool = False
    clock: str = "wall"


Benchmark = Callable[[Options], Row]
