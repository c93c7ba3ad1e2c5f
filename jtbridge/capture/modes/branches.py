"""Traces of functions that branch on data: each path is traced, and the graph selects between their results.

``if torch.equal(a, b)`` has no answer on tensors without values. One trace takes the answer True, another one False.
The joined graph computes both paths and the condition, and the condition selects the results. This works for a few
conditions and for paths whose results have equal shapes; everything else is refused.

A path that only raises, such as a failed check of an argument, is not in the graph. Where torch would raise, the
results are NaN (`NO_INT64` for int64, the least integer of any other integer type, False for bool), because a JAX
program cannot raise.
"""

from __future__ import annotations

import dis
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from jtbridge._compat import TorchDispatchMode
from jtbridge.core.dtypes import NO_INT64
from jtbridge.core.library_files import is_library
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.errors import JtbridgeError, TranslationError

_MAX_SPLITS = 3  # the most conditions on one path for which both answers lead to results
_MAX_CONDITIONS = 64  # the most conditions on one path
ASSERTING = (torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg)

Result = TypeVar("Result")


class BranchOracle:
    """The conditions that one trace reaches, and the answers to them: first those in `given`, then True."""

    def __init__(self, given: Sequence[bool] = ()):
        self.given = given
        self.conditions: list[torch.Tensor] = []
        self._nan_check: torch.Tensor | None = None  # the last result of a check of `torch.autograd.detect_anomaly`
        self._reads: int | None = None  # the count of unknown numbers read in a call of `number`; None outside one

    def number(self, read: Callable[[], Any]) -> tuple[Any, bool]:
        """Return the number that `read` reads from a tensor, and whether it is known; return 0 if it is unknown."""
        self._reads = 0
        try:
            return read(), self._reads == 0
        finally:
            self._reads = None

    def answer(self, func: Any, args: Sequence[Any]) -> Any:
        """Return the answer to an operator that needs the truth value of data; NotImplemented for other operators.

        Inside a call of `number`, an operator that reads a number gets the answer 0. Under
        `torch.autograd.detect_anomaly`, torch asks after each operator of a backward whether a gradient has a NaN. The
        answer is no, because the values exist only when the program runs.
        """
        if func is torch.ops.aten._is_any_true.default and torch.is_anomaly_check_nan_enabled():
            self._nan_check = func(*args)
            return self._nan_check
        if func is torch.ops.aten._local_scalar_dense.default and args[0] is self._nan_check:
            return False
        if func in ASSERTING:
            if not self._decided(args[0].reshape(()).bool()):
                raise AssertionError(*args[1:])
            return None
        if func is torch.ops.aten.equal.default:
            a, b = args
            if a.shape != b.shape:  # dtypes may differ: torch compares values after promotion
                return False
            return self._decided((a == b).all())
        if func is torch.ops.aten.allclose.default:
            return self._decided(torch.isclose(*args).all())
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return self._decided(args[0].reshape(()))
        if func is torch.ops.aten._local_scalar_dense.default and self._reads is not None:
            self._reads += 1
            return 0
        return NotImplemented

    def _decided(self, condition: torch.Tensor) -> bool:
        number = len(self.conditions)
        if number >= _MAX_CONDITIONS:
            raise TranslationError(f"it branches on data more than {_MAX_CONDITIONS} times")
        self.conditions.append(condition.detach().clone())  # the function may write to the tensor later
        return self.given[number] if number < len(self.given) else True


class BranchReplayMode(TorchDispatchMode):
    """Replaces operators that need the truth value of data by the answers of a :class:`BranchOracle`."""

    def __init__(self, oracle: BranchOracle):
        super().__init__()
        self._oracle = oracle

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = self._oracle.answer(func, args)
        return func(*args, **(kwargs or {})) if answer is NotImplemented else answer


def all_paths(run: Callable[[BranchOracle], Result]) -> list[Result]:
    """Return the results of all paths through a function, except paths on which a check of arguments raises.

    Args:
        run: runs one path.

    Raises:
        TranslationError: there are more paths than a graph can hold.
        Exception: every path raises, or a path raises an exception that no check raised (see `_is_raised_by_check`).
    """
    found = 0

    def run_one(oracle: BranchOracle) -> list[Result]:
        nonlocal found
        result = run(oracle)
        found += 1
        if found > 2**_MAX_SPLITS:
            raise TranslationError(f"it branches on data more than {_MAX_SPLITS} times")
        return [result]

    def join(yes: Any, no: Any, _: int) -> Any:
        if isinstance(yes, Exception):
            return no
        return yes if isinstance(no, Exception) else [*yes, *no]

    return _joined_paths(run_one, join, ())


def traced_on_all_paths(trace: Callable[[BranchOracle], fx.GraphModule]) -> fx.GraphModule:
    """Return one graph of all paths through a function.

    Args:
        trace: traces one path to a graph that returns the results and then the conditions.
    """

    def join(yes: Any, no: Any, number: int) -> Any:
        if isinstance(yes, Exception):
            return yes if isinstance(no, Exception) else _with_answer_guard(no, number, False)
        if isinstance(no, Exception):
            return _with_answer_guard(yes, number, True)
        joined = _selected(yes, no, number)
        joined.meta["splits"] = 1 + max(path.meta.get("splits", 0) for path in (yes, no))
        joined.meta["stores_tensors"] = yes.meta["stores_tensors"] or no.meta["stores_tensors"]
        if joined.meta["splits"] > _MAX_SPLITS:
            raise TranslationError(f"it branches on data more than {_MAX_SPLITS} times")
        return joined

    return _joined_paths(trace, join, ())


def _joined_paths(
    run: Callable[[BranchOracle], Any], join: Callable[[Any, Any, int], Any], given: tuple[bool, ...]
) -> Any:
    """Run all paths that begin with the `given` answers; return the joined results, or the exception if all raise.

    Args:
        run: runs one path.
        join: ``join(yes, no, number)`` joins the results where condition `number` holds and where it does not. Each of
            the two may be an exception instead.
        given: the answers to the first conditions. If it is empty, the exception is raised instead of returned.
    """
    oracle = BranchOracle(given)
    try:
        found = run(oracle)
    except Exception as error:
        raise_if_from_signal(error)
        if not oracle.conditions or not _is_raised_by_check(error):
            raise
        found = error
    for number in reversed(range(len(given), len(oracle.conditions))):
        answers = (*given, *[True] * (number - len(given)), False)
        found = join(found, _joined_paths(run, join, answers), number)
    if isinstance(found, Exception) and not given:
        raise found
    return found


_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_CHECKING = ("distributions", "nn", "functional.py", "__init__.py")  # `torch/__init__.py` defines `torch._check`


def _is_raised_by_check(error: Exception) -> bool:
    """Return whether an exception comes from a `raise` or `assert` outside torch or in torch's checks of arguments."""
    trace = error.__traceback__
    if trace is None or isinstance(error, JtbridgeError):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    if dis.opname[code.co_code[trace.tb_lasti]] != "RAISE_VARARGS":
        return False
    if not is_library(code.co_filename) or code.co_filename == __file__:  # this file raises for torch's assertions
        return True
    part = code.co_filename.removeprefix(_TORCH)
    return part != code.co_filename and part.split(os.sep)[0] in _CHECKING


_NAN = float("nan")


def _with_answer_guard(module: Any, number: int, holds: bool) -> fx.GraphModule:
    """Replace the results by `_no_number` where the answer to condition `number` is not `holds`."""
    (output,) = module.graph.find_nodes(op="output")
    outputs = list(output.args[0])
    first = len(outputs) - number - 1
    condition = outputs.pop()
    with module.graph.inserting_before(output):
        for i, node in enumerate(outputs[:first]):
            value = node.meta["val"]
            nothing = module.graph.call_function(torch.ops.aten.full_like.default, (node, _no_number(value.dtype)))
            values = (node, nothing) if holds else (nothing, node)
            outputs[i] = module.graph.call_function(torch.ops.aten.where.self, (condition, *values))
            nothing.meta, outputs[i].meta = {"val": value}, {"val": value}
    return _with_outputs(module, outputs)


def _no_number(dtype: torch.dtype) -> Any:
    """Return the value that stands for a missing result: NaN, `NO_INT64`, the least integer of other types, False."""
    if dtype is torch.bool:
        return False
    if dtype is torch.int64:
        return NO_INT64
    return _NAN if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _with_outputs(module: fx.GraphModule, outputs: list[Any]) -> fx.GraphModule:
    (output,) = module.graph.find_nodes(op="output")
    output.args = (outputs,)
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    module.recompile()
    return module


def _selected(yes: fx.GraphModule, no: fx.GraphModule, number: int) -> fx.GraphModule:
    """Join two graphs: condition `number`, the last output of both, selects the results of `yes` or of `no`."""
    root = torch.nn.Module()
    graph = fx.Graph()
    places = []
    numbers = itertools.count()
    for node in yes.graph.find_nodes(op="placeholder"):
        places.append(graph.placeholder(str(node.target)))
        places[-1].meta = dict(node.meta)

    def inlined(part: fx.GraphModule) -> list[Any]:
        for node in part.graph.find_nodes(op="get_attr"):
            name = f"{node.target}_{next(numbers)}"
            root.register_buffer(name, getattr(part, str(node.target)))
            node.target = name
        known = dict(zip(part.graph.find_nodes(op="placeholder"), places, strict=True))
        return list(graph.graph_copy(part.graph, known))  # type: ignore[arg-type]

    ours, theirs = inlined(yes), inlined(no)
    condition, first = ours[-1], len(ours) - number - 1
    outputs = []
    for a, b in zip(ours[:first], theirs[:first], strict=True):
        if a.meta["val"].shape != b.meta["val"].shape or a.meta["val"].dtype != b.meta["val"].dtype:
            raise TranslationError("it branches on data, to results of different shapes or dtypes")
        outputs.append(graph.call_function(torch.ops.aten.where.self, (condition, a, b)))
        outputs[-1].meta = {"val": a.meta["val"]}
    graph.output([*outputs, *ours[first:-1]])
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return fx.GraphModule(root, graph)
