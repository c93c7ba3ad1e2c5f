"""Programs of arrays with symbolic sizes, for :func:`jax.export` with a symbolic batch.

Such a program is traced with torch's own symbolic sizes. The assumptions that torch makes about them must hold for all
sizes. The program has no derivative: JAX's rules need the shapes, and torch traced no gradient. A batch of it is a
batch of its JAX operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from torch import fx

from jtbridge._compat import (
    broken_assumption,
    kernels_of_symbolic_sizes,
    may_equal,
    symbolic_shapes,
    symbolic_tensors,
)
from jtbridge.capture import GraphUse, examples, trace_on
from jtbridge.core.dtypes import is_differentiable
from jtbridge.core.functions import TracedFunction
from jtbridge.core.primitive_rules import batch_first, batch_size, primitive_of_several_results, zero_tangents
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.errors import DifferentiationError, TranslationError

from ._interpret import Interpretation
from ._lower import lower_program
from ._operators import missing_lowering_reason
from ._program import jax_semantics, precision

_EXAMPLES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 61, 127, 251, 509, 1021, 2039, 4093, 8191, 16381, 7, 5, 3, 2)


def is_symbolic(shape: Sequence[Any]) -> bool:
    """Return whether a shape has a size that is not an integer."""
    return any(not isinstance(size, int) for size in shape)


def example_shapes(shapes: Sequence[Sequence[Any]]) -> list[tuple[int, ...]]:
    """Return shapes with a number for each symbol that differs from all other sizes, and that the symbol can have.

    Raises:
        TranslationError: a size is an expression of symbols, or no number is left for a symbol.
    """
    taken = {size for shape in shapes for size in shape if isinstance(size, int)}
    examples: dict[str, int] = {}
    for size in (size for shape in shapes for size in shape if not isinstance(size, int)):
        name = str(size)
        if not name.isidentifier():
            raise TranslationError(
                f"An argument has the symbolic size `{name}`, which is an expression. Give each size a symbol "
                'of its own: `jax.export.symbolic_shape("n, 3")`.'
            )
        if name not in examples:
            example = next((n for n in _EXAMPLES if n not in taken and may_equal(size, n)), None)
            if example is None:
                raise TranslationError(
                    f"There is no example for the symbolic size `{name}`: the arguments have too many symbolic sizes "
                    "or too narrow constraints. Give some sizes as numbers, or use one symbol for sizes that are equal."
                )
            taken.add(example)
            examples[name] = example
    return [tuple(size if isinstance(size, int) else examples[str(size)] for size in shape) for shape in shapes]


def symbolic_program(traced: TracedFunction, shapes: Sequence[Sequence[Any]]) -> ClosedJaxpr:
    """Return `traced`, a function for the example shapes, as a program of arrays of the symbolic shapes.

    Raises:
        TranslationError: the function cannot be translated, or only for some sizes.
    """
    module, environment, symbols = _graph_with_symbols(traced, shapes)
    _refuse_assumptions(traced, environment, symbols)
    reason = missing_lowering_reason(module)
    if reason is not None:
        raise TranslationError(f"`{traced.name}`: {reason}")
    for node in module.graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor | list | tuple):
            node.meta["jax_shapes"] = symbolic_shapes(node.meta["val"], symbols)
    run = Interpretation(module, traced.name, traced.seed_position)
    with jax_semantics(precision(traced)):
        program = jax.make_jaxpr(run)(
            *(jax.ShapeDtypeStruct(tuple(s), t.dtype) for s, t in zip(shapes, traced.in_types, strict=True))
        )
    _refuse_assumptions(traced, environment, symbols)  # a lowering may have used a symbol as a number
    return program


def _refuse_assumptions(traced: TracedFunction, environment: Any, symbols: Mapping[Any, Any]) -> None:
    found = broken_assumption(environment, symbols)
    if found is not None:
        assumed, constraint = found
        states = f'constrain it (`jax.export.symbolic_shape(..., constraints=["{constraint}"])`), '
        raise TranslationError(
            f"`{traced.name}` works for some sizes only: {assumed} was assumed while it was traced. Give this size as "
            f"a number, {'' if constraint is None else states}or change the code that assumes it."
        )


def _graph_with_symbols(
    traced: TracedFunction, shapes: Sequence[Sequence[Any]]
) -> tuple[fx.GraphModule, Any, dict[Any, Any]]:
    """Return the graph, the environment with torch's assumptions, and torch's symbol for each symbol of JAX."""
    sizes = [
        [(example, not isinstance(size, int)) for example, size in zip(type_.shape, shape, strict=True)]
        for type_, shape in zip(traced.in_types, shapes, strict=True)
    ]
    dtypes = [x.dtype for x in examples(traced.in_types)]
    tensors, environment = symbolic_tensors(sizes, dtypes)
    symbols = {
        symbol: size
        for tensor, shape in zip(tensors, shapes, strict=True)
        for size, symbol in zip(tensor.shape, shape, strict=True)
        if not isinstance(symbol, int)
    }

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return [y.detach() for y in traced.of_symbolic_sizes(*inputs)]

    try:
        with traced.state.applied(), kernels_of_symbolic_sizes():
            return traced.guarded(lambda: trace_on(run, tensors, GraphUse.TRANSLATE)), environment, symbols
    except Exception as error:
        raise_if_from_signal(error)
        found = str(error).rstrip(".")
        raise TranslationError(
            f"`{traced.name}` cannot be traced with symbolic sizes: {found}. Give the sizes as numbers."
        ) from error


def torch_symbolic(*args: Any, name: str, program: ClosedJaxpr) -> list[Any]:
    """Bind a program of symbolic sizes as part of a JAX program; `name` is the function's name, for messages."""
    return torch_symbolic_p.bind(*args, name=name, program=program)


torch_symbolic_p = primitive_of_several_results("torch_symbolic")


def _lower(ctx: mlir.LoweringRuleContext, *args: Any, name: str, program: ClosedJaxpr) -> Sequence[Any]:
    del name
    # The precision has no effect here: the program's matmuls have their own.
    return lower_program(ctx, program, args, matmul_precision="highest")


def _batch(args: Sequence[Any], dims: Sequence[Any], *, name: str, program: ClosedJaxpr) -> Any:
    args, dims = batch_first(args, dims)
    rows = jax.vmap(jaxpr_as_fun(program), in_axes=dims, axis_size=batch_size(args, dims))
    with jax_semantics("highest"):  # the program's matmuls have their own precision
        batched = jax.make_jaxpr(rows)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args))
    return torch_symbolic(*args, name=name, program=batched), [0] * len(program.out_avals)


def _jvp(primals: Sequence[Any], _: Sequence[Any], *, name: str, program: ClosedJaxpr) -> Any:
    if not any(is_differentiable(aval.dtype) for aval in program.out_avals):  # such as the result of a comparison
        results = torch_symbolic(*primals, name=name, program=program)
        return results, zero_tangents(results)
    raise DifferentiationError(
        f"`{name}` has arguments with symbolic sizes, and such a program has no derivative. Compute the derivative in "
        "torch inside the wrapped function, for example by `torch.func.grad`, or give the sizes as numbers. A symbolic "
        "batch of rows may have one: put `jax.vmap` around the derivative."
    )


torch_symbolic_p.def_abstract_eval(lambda *_, program, **__: program.out_avals)
mlir.register_lowering(torch_symbolic_p, _lower)
batching.primitive_batchers[torch_symbolic_p] = _batch
ad.primitive_jvps[torch_symbolic_p] = _jvp
