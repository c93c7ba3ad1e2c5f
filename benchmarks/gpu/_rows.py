"""The result of a benchmark: values of contestants, and the targets for some of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks._results import Cell, Failed


@dataclass(frozen=True)
class Options:
    """Options of a measurement."""

    dry: bool = False  # tiny arrays, one turn
    rounds: int = 5
    turn_seconds: float = 0.03

    def pick(self, size: int, tiny: int) -> int:
        """Return `size`, or `tiny` for a dry run."""
        return tiny if self.dry else size


@dataclass(frozen=True)
class Goal:
    """A target for one contestant.

    Args:
        judged: the name of the contestant.
        limit: the least score: how many times as fast as the fastest of the others the contestant must be. With
            `at_most`, the largest score: its value as a multiple of the smallest value of the others.
        against: the names of the others. A contestant without a number does not count.
        at_most: whether `limit` is an upper bound.
        work: how many times as much work as the others the contestant does. The other is a copy, and the score is a
            share of its bandwidth.
    """

    judged: str
    limit: float
    against: tuple[str, ...]
    at_most: bool = False
    work: float | None = None

    def score(self, cells: dict[str, Cell]) -> float | None:
        """Return the score; None if there is nothing to compare."""
        mine = cells.get(self.judged)
        others = [cell for name in self.against if isinstance(cell := cells.get(name), float) and cell > 0]
        if not isinstance(mine, float) or not mine > 0 or not others:
            return None
        return mine / min(others) if self.at_most else (self.work or 1.0) * min(others) / mine

    def text(self, cells: dict[str, Cell]) -> str:
        """Return the target, and whether it was met, as text."""
        names = self.against[0] if len(self.against) == 1 else f"the fastest of {', '.join(self.against)}"
        sign = "<=" if self.at_most else ">="
        names += "" if self.work is None else "'s bandwidth"
        wanted = f"{sign} {self._shown(self.limit)} of {names}"
        score = self.score(cells)
        if score is None:
            return wanted
        met = score <= self.limit if self.at_most else score >= self.limit
        return f"{wanted}: {'yes' if met else 'NO'}, {self._shown(score)}"

    def _shown(self, number: float) -> str:
        return f"{number:.2f}x" if self.work is None else f"{number:.0%}"


@dataclass
class Row:
    """One case: for each contestant, a value or the reason why it has none."""

    key: str
    title: str
    unit: str
    cells: dict[str, Cell]
    goals: tuple[Goal, ...] = ()
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[tuple[str, str, str]]:
        """Return, for each contestant, its name, its value or the reason why it has none, and its targets."""
        return [(name, self._shown(cell), self.targets(name)) for name, cell in self.cells.items()]

    def targets(self, name: str) -> str:
        return "\n".join(goal.text(self.cells) for goal in self.goals if goal.judged == name)

    def _shown(self, cell: Cell) -> str:
        if isinstance(cell, Failed):
            return cell.reason
        return f"{cell:.3g} {self.unit}" if cell < 1000 else f"{cell:,.0f} {self.unit}"
