"""Islands: operators that torch runs inside a translated program, each in one call.

An operator is an island because it has no lowering, or because torch may be faster (`_costs.py`). An island of the
second kind also has a lowering. The choice (`_choice.py`) is made when the program is lowered, because the platform and
the batch are known then.

An island is one node of a captured graph, or a region of nodes whose sizes depend on data (`_regions.py`). Its graph is
a torch function, so it is batched like every torch function: by `torch.func.vmap` in one call, or row by row if torch
has no batching rule. It needs no derivative: graphs are captured after autograd, and the gradient of a program is
another captured graph.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, subjaxprs
from jax.interpreters import batching
from torch import fx

from jtbridge._compat import (
    OpOverload,
    add_policy_rule,
    forgetting_graph_sources,
    is_zero,
    schema_of,
    torch_batches,
)
from jtbridge.capture import GraphFunction, draws, probe_vmap
from jtbridge.core.array_types import Tensors, array_type
from jtbridge.core.context_variables import assigned
from jtbridge.core.dtypes import numpy_dtype, torch_dtype
from jtbridge.core.functions import TorchFunction, TracedFunction
from jtbridge.core.overlap import may_overlap
from jtbridge.core.positions import replaced
from jtbridge.core.primitive_rules import batch_first, batch_size, primitive_of_several_results
from jtbridge.core.torch_state import TorchState
from jtbridge.errors import DTypeError, OutputMismatchError
from jtbridge.transforms import Vmap, unbatched

from ._costs import Workload, may_be_faster, tensor_of, workload_of

# Parts of the names of operators whose results depend on the strides of their arguments, or have undefined values.
_BY_STRIDES = ("strided", "_reshape_alias", "resize", "empty")
_BY_VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


@dataclasses.dataclass(eq=False, kw_only=True)
class Island(GraphFunction):
    """The graph of one operator, or of a region.

    Attributes:
        operators: the operator; or the operators of a region, beginning with the first whose result depends on data.
        reason: why the island has to run in torch; None if it also has a lowering.
        workload: the operator's workload, if it also has a lowering.
    """

    operators: tuple[OpOverload, ...]
    reason: str | None
    workload: Workload | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expected = [
            (torch.Size(type_.shape), torch_dtype(type_.dtype, f"a result of `{self.operator}`"))
            for type_ in self.out_types
        ]

    @property
    def operator(self) -> str:
        """The name of the operator, or of the first one with the number of the others."""
        first, *others = self.operators
        return f"{first} and {len(others)} more" if others else str(first)

    @property
    def state(self) -> TorchState:
        # No tensor requires a gradient, so recording stays as it is: switching takes a fifth of a small island's time.
        state = self.owner.trace_state
        return dataclasses.replace(state.without_casts(), grad=state.grad)

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        results = super().__call__(*tensors)
        for result, (shape, dtype) in zip(results, self._expected, strict=True):
            if result.shape != shape or result.dtype is not dtype:
                if len(self.operators) > 1:
                    raise OutputMismatchError(
                        f"In `{self.base.name}`, the operators whose shapes depend on data (`{self.operator}`) gave a "
                        f"{result.dtype} tensor of shape {tuple(result.shape)}, but when it was traced, {dtype} and "
                        f'{tuple(shape)}. Wrap it with `islands="never"`.'
                    )
                raise OutputMismatchError(
                    f"Operator `{self.operator}` returned a {result.dtype} tensor of shape {tuple(result.shape)}, but "
                    f"its fake implementation gave {dtype} and {tuple(shape)} when `{self.base.name}` was traced. "
                    "Correct the function given to `register_fake`."
                )
        return results

    def __repr__(self) -> str:
        return self.operator  # shown in a printed jaxpr


torch_island_p = primitive_of_several_results("torch_island")


# torch_island[fn, lowered](x...) -> y...: `lowered` is the program of the operator's lowering, or None.
@torch_island_p.def_abstract_eval
def _(*_: Any, fn: TorchFunction, lowered: ClosedJaxpr | None) -> list[ShapedArray]:
    del lowered
    return [ShapedArray(type_.shape, type_.dtype) for type_ in fn.out_types]


# batching:  one call of vmap(operator) for the whole batch.
def _batch(
    args: Sequence[Any], dims: Sequence[int | None], *, fn: TorchFunction, lowered: ClosedJaxpr | None
) -> tuple[list[Any], list[int]]:
    size = batch_size(args, dims)
    args, dims = batch_first(args, dims)
    batched = Vmap(fn, dims, size)
    if lowered is None:
        probe_vmap(batched)
    else:
        by_rows = jax.vmap(jaxpr_as_fun(lowered), in_axes=dims, axis_size=size)
        if not torch_batches(island_of(fn).operators[0]):
            return by_rows(*args), [0] * len(fn.out_types)
        lowered = jax.make_jaxpr(by_rows)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args))
    results = torch_island_p.bind(*args, fn=batched, lowered=lowered)
    return results, [0] * len(results)


batching.primitive_batchers[torch_island_p] = _batch


# policies of jax.checkpoint:  results are saved if the policy saves the island, or an operation of its lowering.
def _policy_rule(policy: Callable[..., Any], equation: Any) -> str:
    lowered = equation.params["lowered"]
    equations = [equation] if lowered is None else [equation, *lowered.jaxpr.eqns]
    saved = any(policy(each.primitive, *(x.aval for x in each.invars), **each.params) for each in equations)
    return "save" if saved else "recompute"


add_policy_rule(torch_island_p, _policy_rule)


def island_of(fn: TorchFunction) -> Island:
    """Return the island that a function computes, or computes over a batch."""
    island = unbatched(fn)
    assert isinstance(island, Island)
    return island


def islands_in(program: ClosedJaxpr) -> list[tuple[TorchFunction, ClosedJaxpr | None]]:
    """Return the islands of a translated program, and of the loops, branches and functions in it, in order.

    Each island is paired with the program of its lowering, or None if it has no lowering.
    """
    found: list[tuple[TorchFunction, ClosedJaxpr | None]] = []
    pending = [program.jaxpr]
    while pending:
        jaxpr = pending.pop()
        islands = (equation for equation in jaxpr.eqns if equation.primitive is torch_island_p)
        found += [(equation.params["fn"], equation.params["lowered"]) for equation in islands]
        pending += subjaxprs(jaxpr)
    return found


def ineligible_reason(node: fx.Node) -> str | None:
    """Return why torch cannot run a node inside a translated program; None if it can."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace == "jtbridge":
        return "it takes functions"
    if any(argument.alias_info is not None for argument in schema_of(target).arguments):
        return "it writes to its arguments, or its results alias them"
    if draws(target, node.args, node.kwargs):
        return "it draws random numbers"
    if any(tag in target.tags for tag in _BY_VALUES):
        return "its shapes or results depend on data"
    is_torchs = target.namespace in ("aten", "prims")
    if is_torchs and schema_of(target).name.startswith("aten::quantize_per_"):
        return "its result is quantized, and torch's fake tensors do not show it"
    if is_torchs and any(part in target.name() for part in _BY_STRIDES):
        return "its results depend on the memory of its arguments"
    inputs = [tensor_of(x) for x in node.all_input_nodes]
    results = _results(node)
    if not results or not all(map(is_array, [*inputs, *results])):
        return "an argument or a result is not an array of fixed shape"
    # `_laid_out` gives a custom operator the strides of its arguments.
    if not is_torchs and any(may_overlap(x, ignoring_expanded=True) for x in inputs):
        return "an argument overlaps itself in memory"
    return None


def workload_for_torch(node: fx.Node) -> Workload | None:
    """Return the workload of a node that torch can run, and may run faster than XLA; None for other nodes.

    An argument that repeats elements, such as an expanded weight, would be copied with all repetitions for the call.
    The measured arguments do not repeat elements, so such a node is left to XLA.
    """
    workload = workload_of(node)
    can = workload is not None and may_be_faster(workload) and ineligible_reason(node) is None and not _may_crash(node)
    return workload if can and not any(_repeats_elements(tensor_of(x)) for x in node.all_input_nodes) else None


def _may_crash(node: fx.Node) -> bool:
    """Return whether torch may crash on NaNs, as it does in the gradient of a `grid_sample` with reflection (2.13)."""
    is_gradient = node.target is torch.ops.aten.grid_sampler_2d_backward.default
    return is_gradient and bool(node.args[4] == _REFLECTION)


def _repeats_elements(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and any(n > 1 and not s for n, s in zip(x.shape, x.stride(), strict=True))


def bind_island(node: fx.Node, owner: TracedFunction, values: Mapping[fx.Node, Any], reason: str) -> Any:
    """Return the value of a node that torch runs. Results that nothing uses are None.

    Args:
        node: the node, which is eligible.
        owner: the function whose graph has the node.
        values: the values of the node's arguments.
        reason: why the node is an island.
    """
    return _bind(node, owner, values, None, reason=reason)


def bind_choice(
    node: fx.Node,
    owner: TracedFunction,
    values: Mapping[fx.Node, Any],
    workload: Workload,
    lowered: Callable[[Mapping[fx.Node, Any]], Any],
) -> Any:
    """Return the value of a node that torch or XLA runs, whichever is faster on the platform of the program.

    Args:
        node, owner, values: as for :func:`bind_island`.
        workload: the node's workload.
        lowered: returns the node's value by its lowering, from the values of its arguments.
    """
    inputs, used = list(node.all_input_nodes), _used(node)

    def by_xla(*arrays: Any) -> list[Any]:
        value = lowered({**values, **dict(zip(inputs, arrays, strict=True))})
        return [value] if isinstance(node.meta["val"], torch.Tensor) else [value[i] for i in used]

    program = jax.make_jaxpr(by_xla)(*(jnp.asarray(values[x]) for x in inputs))
    return _bind(node, owner, values, program, workload=workload)


def _bind(
    node: fx.Node,
    owner: TracedFunction,
    values: Mapping[fx.Node, Any],
    lowered: ClosedJaxpr | None,
    *,
    reason: str | None = None,
    workload: Workload | None = None,
) -> Any:
    inputs = list(node.all_input_nodes)
    results, used = _results(node), _used(node)
    with forgetting_graph_sources():
        module = _graph_of_operator(node, inputs, used)
    island = Island(
        owner=owner,
        module=module,
        in_types=tuple(array_type(tensor_of(x)) for x in inputs),
        out_types=tuple(array_type(results[i]) for i in used),
        operators=(node.target,),  # type: ignore[arg-type]
        reason=reason,
        workload=workload,
    )
    found = bind(island, [values[x] for x in inputs], lowered)
    if isinstance(node.meta["val"], torch.Tensor):
        return found[0]
    return tuple(replaced([None] * len(results), used, found))


def bind(island: Island, arrays: Sequence[Any], lowered: ClosedJaxpr | None) -> list[Any]:
    """Return the results of an island. `lowered` is the program of its lowering, or None if it has no lowering."""
    return torch_island_p.bind(*map(jnp.asarray, arrays), fn=island, lowered=lowered)


_REFLECTION = 2  # the number of this `padding_mode`
# The rule by which a test makes islands of nodes that have a lowering.
_FORCED: contextvars.ContextVar[Callable[[fx.Node], bool] | None] = contextvars.ContextVar("forced", default=None)


def forced_islands(rule: Callable[[fx.Node], bool]) -> contextlib.AbstractContextManager[None]:
    """Make islands of all eligible nodes for which `rule` returns True, in translations inside the block. For tests."""
    return assigned((_FORCED, rule))


def is_forced(node: fx.Node) -> bool:
    """Return whether a test makes an island of a node."""
    rule = _FORCED.get()
    return rule is not None and rule(node) and ineligible_reason(node) is None


def _graph_of_operator(node: fx.Node, inputs: Sequence[fx.Node], used: Sequence[int]) -> fx.GraphModule:
    """Return the graph of one operator: from its tensors to those results that are used."""
    graph = fx.Graph()
    is_custom = node.target.namespace not in ("aten", "prims")  # type: ignore[union-attr]
    copies = graph_inputs(graph, inputs, with_strides=is_custom)
    call = graph.node_copy(node, copies.__getitem__)
    call.meta = {"val": node.meta["val"]}
    results = [call]
    if not isinstance(node.meta["val"], torch.Tensor):
        results = [graph.call_function(operator.getitem, (call, i)) for i in used]
        for i, result in zip(used, results, strict=True):
            result.meta["val"] = node.meta["val"][i]
    graph.output(tuple(results))
    return fx.GraphModule({}, graph)


def graph_inputs(graph: fx.Graph, inputs: Sequence[fx.Node], *, with_strides: bool) -> dict[fx.Node, fx.Node]:
    """Add the inputs of an island to its graph; return the added node of each input.

    Args:
        graph: the graph.
        inputs: the nodes whose values the island takes.
        with_strides: whether to give the values the strides that they have in the user's function.
    """
    copies = {}
    for number, source in enumerate(inputs):
        copies[source] = graph.placeholder(f"input_{number}")
        copies[source].meta["val"] = tensor_of(source)
    for source in inputs if with_strides else ():
        value = tensor_of(source)
        if not value.is_contiguous():
            copies[source] = graph.call_function(_laid_out, (copies[source], tuple(value.shape), value.stride()))
    return copies


def _laid_out(x: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with the strides that it has in the user's function. A custom operator may read them."""
    repeated = [i for i, stride in enumerate(strides) if stride == 0 and shape[i] > 1]
    if repeated:
        for i in repeated:
            x = x.narrow(i, 0, 1)
        once = [1 if i in repeated else size for i, size in enumerate(shape)]
        return _laid_out(x, tuple(once), strides).expand(shape)
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _results(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, list | tuple) else [value]


def _used(node: fx.Node) -> list[int]:
    """Return the positions of the results that are used."""
    results = _results(node)
    if isinstance(node.meta["val"], torch.Tensor):
        return [0]
    used = set(range(len(results)))
    if all(user.target is operator.getitem for user in node.users):
        used = {int(user.args[1]) for user in node.users}  # type: ignore[arg-type]
    return [i for i in sorted(used) if isinstance(results[i], torch.Tensor)]


def is_array(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or is_zero(value):
        return False
    try:
        numpy_dtype(value.dtype, "a tensor")
    except DTypeError:
        return False
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))
