"""From a torch function to a JAX function that computes the same: ``program(fn)``.

The user's function and its derivatives (`Vjp`, `Jvp`) are each traced, after torch's autograd has had its say, and
the graph is interpreted in JAX. A batched function is the batched interpretation, by `jax.vmap`: derivatives of it are
rewritten as batched derivatives, so torch.vmap is never needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from torch import fx

from jtbridge._compat import forgetting_graph_sources
from jtbridge._functions import ArrayType, TorchFunction, TracedFunction
from jtbridge._torch_state import TorchState
from jtbridge._transforms import Jvp, Vjp, Vmap
from jtbridge.capture import GraphFunction, lift_constants, trace
from jtbridge.errors import JtbridgeError, TranslationError

from ._high_rank import with_guarded_sums
from ._interpret import Interpretation
from ._operators import obstacle

Run = Callable[..., list[Any]]


@dataclasses.dataclass(frozen=True)
class Batched:
    """`run` over a batch, in the place of what `source` is: its results come stacked, or summed over the batch."""

    source: TorchFunction  # of one row
    inner: Batched | TorchFunction
    in_dims: tuple[int | None, ...]
    out_dims: tuple[int | str, ...]  # an axis, or "sum"
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramPart(TorchFunction):
    """A part of a program that was translated already. There is no torch function of it."""

    owner: TracedFunction
    program: ClosedJaxpr
    in_types: tuple[ArrayType, ...]
    out_types: tuple[ArrayType, ...]

    @property
    def base(self) -> TracedFunction:
        return self.owner

    @property
    def state(self) -> TorchState:
        return self.owner.state

    @property
    def order(self) -> int:
        return 1


def translate(fn: TorchFunction, *, kernels: bool = False) -> ClosedJaxpr:
    """`fn` as a JAX program with 64-bit types inside.

    Args:
        fn: the function.
        kernels: whether its operators are kernels (of `jtbridge.kernels`) where they can be.

    Raises:
        TranslationError: it cannot be translated; the message says why.
    """
    if isinstance(fn, ProgramPart):
        return fn.program
    cache = fn.base.translations
    key = (fn, kernels, precision(fn.base))
    if key not in cache:
        try:
            cache[key] = _traced_in_jax(_run_of(_normalised(fn), kernels), fn)
        except TranslationError as error:
            cache[key] = error.with_traceback(None)
        except JtbridgeError:  # torch would refuse it too
            raise
        except Exception as error:  # noqa: BLE001  (whatever the reason, another backend may do)
            cache[key] = TranslationError(f"`{fn.base.name}` cannot be translated: {type(error).__name__}: {error}")
    found = cache[key]
    if isinstance(found, TranslationError):
        raise found
    return found


def untranslatable_reason(fn: TorchFunction) -> str | None:
    """Why :func:`translate` fails; None if it succeeds."""
    try:
        translate(fn)
    except TranslationError as error:
        return str(error)
    return None


def _traced_in_jax(run: Run, fn: TorchFunction) -> ClosedJaxpr:
    """Before anything is lowered, so that what fails does so while another backend can still be chosen."""
    avals = [jax.ShapeDtypeStruct(type_.shape, type_.dtype) for type_ in fn.in_types]
    with jax_semantics(precision(fn.base)):
        program = jax.make_jaxpr(run)(*avals)
    for i, (got, want) in enumerate(zip(program.out_avals, fn.out_types, strict=True)):
        if got.shape != want.shape or got.dtype != want.dtype:
            raise TranslationError(f"result {i} of `{fn.base.name}` became {got.str_short()}, torch's is {want}")
    return with_guarded_sums(program)


@contextlib.contextmanager
def jax_semantics(matmul_precision: str) -> Iterator[None]:
    """JAX's settings while a graph is interpreted: torch's dtypes, whatever the program around it has chosen.

    Debugging switches are off: what is computed here is a constant, or a part of the program that JAX will check.

    Args:
        products: see :func:`precision`.
    """
    with (
        jax.disable_jit(False),  # a loop of a lowering would run in Python
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.default_matmul_precision(matmul_precision),
    ):
        yield


def precision(traced: TracedFunction) -> str:
    """How float32 is multiplied: as JAX was told to, or else as torch was, whose default is as float32.

    JAX's own default takes ten bits on a GPU and seven on a TPU.
    """
    asked_for = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return asked_for or _PRECISIONS[traced.trace_state.matmul_precision]


_PRECISIONS = {"highest": "highest", "high": "high", "medium": "default"}


def _normalised(fn: TorchFunction) -> Batched | TorchFunction:
    """`fn` with its batching outermost."""
    match fn:
        case Vmap():
            out_dims = tuple("sum" if i in fn.summed else 0 for i in range(len(fn.out_types)))
            return Batched(fn.fn, _normalised(fn.fn), fn.dims, out_dims, fn.size)
        case Jvp():
            return _jvp(_normalised(fn.fn), fn.wrt, fn.outs)
        case Vjp():
            return _vjp(_normalised(fn.fn), fn.wrt, fn.outs)
    return fn


# (x, dx) -> Df(x) dx  of a batch is a batch of it; a sum over the batch is linear.
def _jvp(fn: Batched | TorchFunction, wrt: tuple[int, ...], outs: tuple[int, ...]) -> Batched | TorchFunction:
    if not isinstance(fn, Batched):
        return Jvp(fn, wrt, outs)
    return Batched(
        Jvp(fn.source, wrt, outs),
        _jvp(fn.inner, wrt, outs),
        (*fn.in_dims, *(fn.in_dims[i] for i in wrt)),
        tuple(fn.out_dims[o] for o in outs),
        fn.size,
    )


# (x, ct) -> ct Df(x)  of a batch: an argument that all rows share gets the sum of their gradients, and a result that is
# a sum has the one cotangent for all rows.
def _vjp(fn: Batched | TorchFunction, wrt: tuple[int, ...], outs: tuple[int, ...]) -> Batched | TorchFunction:
    if not isinstance(fn, Batched):
        return Vjp(fn, wrt, outs)
    cotangent_dims = [None if (dim := fn.out_dims[o]) == "sum" else dim for o in outs]
    return Batched(
        Vjp(fn.source, wrt, outs),
        _vjp(fn.inner, wrt, outs),
        (*fn.in_dims, *cotangent_dims),  # type: ignore[arg-type]
        tuple("sum" if (dim := fn.in_dims[i]) is None else dim for i in wrt),
        fn.size,
    )


def _run_of(fn: Batched | TorchFunction, kernels: bool) -> Run:
    if isinstance(fn, Batched):
        return _batched_run(fn, kernels)
    if isinstance(fn, ProgramPart):
        return jaxpr_as_fun(fn.program)
    return Interpretation(graph_of(fn), fn.base.name, _seed_position(fn), kernels=kernels)


def _batched_run(fn: Batched, kernels: bool) -> Run:
    row = _run_of(fn.inner, kernels)

    def run(*arrays: Any) -> list[Any]:
        if fn.size == 0:
            return [_of_no_rows(type_, dim) for type_, dim in zip(fn.source.out_types, fn.out_dims, strict=True)]
        columns = jax.vmap(row, in_axes=fn.in_dims, out_axes=0, axis_size=fn.size)(*arrays)
        return [_placed(column, dim) for column, dim in zip(columns, fn.out_dims, strict=True)]

    return run


def _placed(column: jax.Array, dim: int | str) -> jax.Array:
    if dim == "sum":
        return jnp.sum(column, axis=0, dtype=column.dtype)
    return jnp.moveaxis(column, 0, int(dim))


def _of_no_rows(type_: Any, dim: int | str) -> jax.Array:
    shape = type_.shape if dim == "sum" else (*type_.shape[: int(dim)], 0, *type_.shape[int(dim) :])
    return jnp.zeros(shape, type_.dtype)


def graph_of(fn: TorchFunction) -> fx.GraphModule:
    """The functional ATen graph of a torch function that is not batched, all of whose operators have lowerings.

    Raises:
        TranslationError: torch cannot trace it, or it holds an operator without a lowering.
    """
    module = captured(fn)
    reason = obstacle(module)
    if reason is not None:
        raise TranslationError(f"`{fn.base.name}`: {reason}")
    return module


def captured(fn: TorchFunction) -> fx.GraphModule:
    """The functional ATen graph of a torch function that is not batched.

    Raises:
        TranslationError: torch cannot trace it.
    """
    traced = fn.base
    if isinstance(fn, GraphFunction):
        return fn.module
    if isinstance(fn, TracedFunction) and fn.graph is not None:
        return fn.graph
    if traced.traits.untranslatable:
        raise TranslationError(f"`{traced.name}` cannot be traced: {traced.traits.untranslatable}")
    return _traced(fn)


def _without_forward_mode(fn: TorchFunction) -> bool:
    """Have the forward derivatives in `fn` go through two reverse modes, if any of them does not yet.

    Torch's forward mode has zeros on another device, which cannot always be traced.
    """
    changed = False
    while isinstance(fn, Jvp | Vjp):
        if isinstance(fn, Jvp) and fn not in fn.base.double_reverse:
            fn.base.double_reverse.add(fn)
            changed = True
        fn = fn.fn
    return changed


def _seed_position(fn: TorchFunction) -> int | None:
    if isinstance(fn, GraphFunction):
        return fn.seed
    return len(fn.base.in_types) - 1 if fn.base.seeded else None


def _traced(fn: TorchFunction) -> fx.GraphModule:
    traced = fn.base

    def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return [y.detach() for y in fn(*tensors)]

    by_reverse_mode = len(traced.double_reverse)
    try:
        with forgetting_graph_sources(), fn.state.applied():
            module = traced.guarded(lambda: trace(run, fn.in_types, to_run=False))
    except JtbridgeError:
        raise
    except Exception as error:
        if len(traced.double_reverse) > by_reverse_mode or _without_forward_mode(fn):
            return _traced(fn)
        lines = str(error).strip().splitlines()
        raise TranslationError(
            f"`{traced.name}` cannot be traced ({type(fn).__name__}): {type(error).__name__}: "
            f"{lines[0] if lines else ''}"
        ) from error
    if len(traced.double_reverse) > by_reverse_mode:  # the graph holds what was traced before forward mode failed
        return _traced(fn)
    lift_constants(module, traced)
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return module
