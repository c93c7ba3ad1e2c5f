"""The result of a benchmark: a row with a number for each contestant, or the reason why it has no number."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

TORCH = "torch"
EAGER = "jtbridge eager"
XLA = "jtbridge xla"
ISLANDS = "jtbridge islands"
DLPACK = "jtbridge dlpack"
CALLBACK = "jtbridge callback"
REVERSE = "jtbridge reverse"
TORCH2JAX = "wrap-torch2jax"
BY_HAND = "pure_callback"
TORCHAX = "torchax"
JAX2TORCH = "jax2torch"
JNP = "written in jnp"
COLUMNS = (EAGER, XLA, ISLANDS, DLPACK, CALLBACK, REVERSE, TORCH2JAX, BY_HAND, TORCHAX, JAX2TORCH, JNP, TORCH)


@dataclass(frozen=True)
class Failed:
    """The reason why a contestant has no number."""

    reason: str

    @classmethod
    def from_error(cls, error: BaseException) -> "Failed":
        """Keep the most telling line of an error: JAX's message contains the whole traceback of a callback."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip(" -")]
        text = next((line for line in reversed(lines) if "Error" in line), lines[0] if lines else "")
        return cls(f"{type(error).__name__}: {text}"[:200])


Cell = float | Failed
Calls = dict[str, Callable[[], Any] | Failed]


@dataclass(frozen=True)
class Target:
    """The limit for the ratio of the contestant `judged` to `against`, or for its value if `against` is None."""

    judged: str
    limit: float
    against: str | None = None


@dataclass
class Row:
    """One line of the table. The ratios shown are to the contestant `against`."""

    key: str
    title: str
    unit: str
    cells: dict[str, Cell]
    against: str | None = None
    targets: tuple[Target, ...] = ()
    notes: list[str] = field(default_factory=list)

    def ratio(self, name: str, against: str | None = None) -> float | None:
        """Return a contestant's value divided by that of another; None if one of the two has no number."""
        cell, base = self.cells.get(name), self.cells.get(against or self.against or "")
        return cell / base if isinstance(cell, float) and isinstance(base, float) and base > 0 else None

    def verdict(self) -> str:
        """Return the targets, and whether this run met them, as text."""
        return "\n".join(map(self._verdict, self.targets))

    def _verdict(self, target: Target) -> str:
        name = target.judged.removeprefix("jtbridge ")
        if target.against:
            got = self.ratio(target.judged, target.against)
            wanted = f"{name} <= {target.limit:.2f}x of {target.against}"
            shown = "" if got is None else f"{got:.2f}x"
        else:
            cell = self.cells.get(target.judged)
            got = cell if isinstance(cell, float) else None
            wanted, shown = f"{name} <= {target.limit:g} {self.unit}", ""
        return wanted if got is None else f"{wanted}: {'yes' if got <= target.limit else 'NO'} {shown}".rstrip()


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    quick: bool = False
    clock: str = "wall"


Benchmark = Callable[[Options], Row]
