"""Analysis of a Triton kernel's intermediate representation (TTIR): the parameters that the kernel writes.

The pointer operand of each store is followed back, through pointer arithmetic, branches and loops, to the parameters
that it can come from. A pointer from elsewhere, for example one that is loaded from memory, can be any parameter.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection

_VALUE = re.compile(r"%[A-Za-z_0-9.$-]+(?:#\d+)?")
_LINE = re.compile(r"^\s*(?:(?P<result>%[\w.$-]+)(?::(?P<count>\d+))? = )?\"?(?P<op>[a-z_]+\.[\w.]+)\"?(?P<rest>.*)$")
_LOCATION = re.compile(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_WRITES = {
    "tt.store",
    "tt.atomic_rmw",
    "tt.atomic_cas",
    "tt.descriptor_store",
    "tt.descriptor_reduce",
    "tt.descriptor_scatter",
}
# Operations whose result points into the memory of their first operand.
_POINTER_OPERATIONS = {
    "tt.addptr",
    "tt.splat",
    "tt.broadcast",
    "tt.expand_dims",
    "tt.reshape",
    "tt.trans",
    "tt.bitcast",
    "tt.make_tensor_descriptor",
}


def mutated_parameters(ttir: str, parameters: Collection[str]) -> set[str] | None:
    """Return the parameters that a kernel writes to; None if the analysis cannot tell.

    Args:
        ttir: Triton's intermediate representation of the kernel, all calls inlined.
        parameters: the names of the parameters.
    """
    if "tt.call" in ttir or "pure = false" in ttir:
        return None
    code = _PointerFlow(ttir, parameters)
    found: set[str] = set()
    seen: set[str] = set()
    pending = code.targets
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in code.parameters:
            found.add(code.parameters[value])
        elif value in code.sources:
            pending += code.sources[value]
        else:
            return None
    return found


@dataclasses.dataclass
class _Region:
    """The body of a branch or a loop. Names of values are unique only within their region."""

    op: str = ""
    results: list[str] = dataclasses.field(default_factory=list)  # the results of the branch or loop
    carried: list[str] = dataclasses.field(default_factory=list)  # the values that a loop carries between iterations
    passed: list[str] = dataclasses.field(default_factory=list)  # the values that a `while` passes to its body
    names: dict[str, str] = dataclasses.field(default_factory=dict)  # unique names of the values defined here


class _PointerFlow:
    """The flow of pointers in a kernel.

    Attributes:
        sources: for each value, the values from which it is computed if it is a pointer.
        targets: the pointers to which the kernel stores.
        parameters: for each value that is a parameter, the parameter's name.
    """

    def __init__(self, ttir: str, parameters: Collection[str]):
        self.sources: dict[str, list[str]] = {}
        self.targets: list[str] = []
        self._count = 0
        self._regions = [_Region()]
        self.parameters = {self._defined(f"%{name}"): name for name in parameters}
        for line in ttir.splitlines():
            self._read(_LOCATION.sub("", line).strip())

    def _read(self, line: str) -> None:
        if line.startswith("}"):
            closed = self._regions.pop()
            if line.endswith("{"):  # the other branch, or the body of a `while`
                self._regions.append(dataclasses.replace(closed, names={}))
        elif line.startswith("^"):
            inside = self._regions[-1]
            self._flow([self._defined(name) for name in _VALUE.findall(line)], inside.passed)
        elif (match := _LINE.match(line)) is not None:
            self._read_operator(match, opens=line.endswith("{"))
        elif line.endswith("{"):
            self._regions.append(_Region())

    def _read_operator(self, match: re.Match[str], *, opens: bool) -> None:
        op, rest = match["op"], match["rest"]
        operands = [self._used(name) for name in _VALUE.findall(rest.split(" : ")[0])]
        count = int(match["count"] or 1)
        name = match["result"]
        names = [] if name is None else [name] if count == 1 else [f"{name}#{i}" for i in range(count)]
        results = [self._defined(name) for name in names]
        inside = self._regions[-1]
        if op in _WRITES:
            self.targets.append(operands[0])
        elif op in _POINTER_OPERATIONS:
            self._flow(results, operands[:1])
        elif op == "arith.select":
            self._flow(results, operands[1:2])
            self._flow(results, operands[2:])
        elif op == "scf.condition":
            inside.passed = operands[1:]
            self._flow(inside.results, inside.passed)
        elif op == "scf.yield":
            self._flow(inside.carried, operands)
            if inside.op != "scf.while":
                self._flow(inside.results, operands)
        if opens:
            self._open(op, rest, results)

    def _open(self, op: str, rest: str, results: list[str]) -> None:
        pairs = re.findall(rf"({_VALUE.pattern}) = ({_VALUE.pattern})", rest)
        starts = [self._used(start) for _, start in pairs]
        region = _Region(op, results)
        self._regions.append(region)
        carried = [self._defined(name) for name, _ in pairs]
        if op == "scf.for":  # the first pair is the counter; the loop may run zero times
            carried, starts = carried[1:], starts[1:]
            self._flow(results, starts)
        region.carried = carried
        self._flow(carried, starts)

    def _defined(self, name: str) -> str:
        self._count += 1
        self._regions[-1].names[name] = f"{name}@{self._count}"
        return self._regions[-1].names[name]

    def _used(self, name: str) -> str:
        return next((region.names[name] for region in reversed(self._regions) if name in region.names), name)

    def _flow(self, into: list[str], values: list[str]) -> None:
        for name, value in zip(into, values, strict=False):
            self.sources.setdefault(name, []).append(value)
