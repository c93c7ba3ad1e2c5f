"""Translation of a torch function to a JAX program that computes the same: ``translate(fn)``.

The user's function and its derivatives (`Vjp`, `Jvp`) are each traced, after torch's autograd, and the graph is
interpreted in JAX. A batched function is the interpretation of one row, batched by `jax.vmap`. A derivative of a batch
is rewritten as a batch of derivatives, so torch.vmap is never needed.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from torch import fx

from jtbridge._compat import forgetting_graph_sources
from jtbridge.capture import GraphFunction, aten_graph
from jtbridge.core import tuning
from jtbridge.core.array_types import ArrayType
from jtbridge.core.functions import TorchFunction, TracedFunction
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.core.torch_state import TorchState
from jtbridge.errors import JtbridgeError, TranslationError
from jtbridge.transforms import Jvp, Vjp, Vmap

from ._costs import may_be_tuned
from ._high_rank import with_clamped_sums
from ._interpret import Interpretation
from ._islands import island_of, islands_in
from ._operators import missing_lowering_reason
from ._regions import with_regions

Run = Callable[..., list[Any]]


@dataclasses.dataclass(frozen=True)
class Batched:
    """A function of one row, mapped over a batch. Each result is stacked along an axis, or summed over the batch."""

    source: TorchFunction  # the function of one row
    inner: Batched | TorchFunction  # `source` with its batching outermost: a `Batched` if it has another batch
    in_dims: tuple[int | None, ...]
    out_dims: tuple[int | str, ...]  # an axis, or "sum"
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramPart(TorchFunction):
    """A part of a program that is already translated. It has no torch function."""

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


def translate(fn: TorchFunction, *, kernels: bool | frozenset[str] = False) -> ClosedJaxpr:
    """Return `fn` as a JAX program that uses 64-bit types.

    Args:
        fn: the function.
        kernels: whether to use the kernels of `jtbridge.kernels` for the operators that have one; or the names of the
            kernels to use, with references instead of the other kernels.

    Raises:
        TranslationError: the function cannot be translated; the message says why.
    """
    if isinstance(fn, ProgramPart):
        return fn.program
    cache = fn.base.cache.translations
    key = translation_key(fn, kernels)
    if key not in cache:
        try:
            with _only_kernels(kernels):
                cache[key] = _traced_in_jax(_run_of(_batching_outermost(fn), kernels is not False), fn)
        except TranslationError as error:
            cache[key] = copy.copy(error)  # without its traceback
        except JtbridgeError:  # the error is addressed to the user, and other backends would raise it too
            raise
        except Exception as error:  # noqa: BLE001  (whatever the reason, another backend may run it)
            raise_if_from_signal(error)
            cache[key] = TranslationError(f"`{fn.base.name}` cannot be translated: {type(error).__name__}: {error}")
    found = cache[key]
    if isinstance(found, TranslationError):
        raise copy.copy(found)  # raising `found` would add frames to it, with JAX's tracers and constants
    return found


def translation_key(
    fn: TorchFunction, kernels: bool | frozenset[str]
) -> tuple[TorchFunction, bool | frozenset[str], str, bool]:
    """Return the key of a function's program in the cache of translations."""
    return fn, kernels, precision(fn.base), may_be_tuned()


def _only_kernels(kernels: bool | frozenset[str]) -> contextlib.AbstractContextManager[None]:
    if isinstance(kernels, bool):
        return contextlib.nullcontext()
    from jtbridge.kernels._proofs import only

    return only(kernels)


def untranslatable_reason(fn: TorchFunction, *, pure: bool = False) -> str | None:
    """Return why :func:`translate` fails; None if it succeeds. A `pure` program has no islands."""
    try:
        program = translate(fn, kernels=fn.base.fuses_chains)
    except TranslationError as error:
        return str(error)
    if not pure or isinstance(fn, ProgramPart):  # torch cannot run a part of a program
        return None
    needed = [island for island, lowered in islands_in(program) if lowered is None]
    return f"`{fn.base.name}`: {island_of(needed[0]).reason}" if needed else None


def _traced_in_jax(run: Run, fn: TorchFunction) -> ClosedJaxpr:
    """Trace `run` to a JAX program before lowering, so that it fails while another backend can still be chosen."""
    avals = [jax.ShapeDtypeStruct(type_.shape, type_.dtype) for type_ in fn.in_types]
    with jax_semantics(precision(fn.base)):
        program = jax.make_jaxpr(run)(*avals)
    for i, (got, want) in enumerate(zip(program.out_avals, fn.out_types, strict=True)):
        if got.shape != want.shape or got.dtype != want.dtype:
            raise TranslationError(
                f"result {i} of `{fn.base.name}` is {got.str_short()} after translation, but {want} in torch"
            )
    return with_clamped_sums(program)


@contextlib.contextmanager
def jax_semantics(matmul_precision: str) -> Iterator[None]:
    """Set JAX's settings for the interpretation of a graph: torch's dtypes, whatever the surrounding program uses.

    Debugging switches are off: the values inside are constants, or parts of a program that JAX checks later.

    Args:
        matmul_precision: see :func:`precision`.
    """
    with (
        jax.disable_jit(False),  # with jit disabled, a loop of a lowering would run in Python
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.default_matmul_precision(matmul_precision),
    ):
        yield


def precision(traced: TracedFunction) -> str:
    """Return the matmul precision of float32: JAX's setting, or else torch's, whose default is full float32.

    JAX's own default keeps ten bits of the mantissa on a GPU, and seven on a TPU.
    """
    asked_for = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return asked_for or _PRECISIONS[traced.trace_state.matmul_precision]


_PRECISIONS = {"highest": "highest", "high": "high", "medium": "default"}


def _batching_outermost(fn: TorchFunction) -> Batched | TorchFunction:
    """Return `fn` with its batching outermost."""
    match fn:
        case Vmap():
            out_dims = tuple("sum" if i in fn.summed else 0 for i in range(len(fn.out_types)))
            return Batched(fn.fn, _batching_outermost(fn.fn), fn.dims, out_dims, fn.size)
        case Jvp():
            return _jvp_of_batch(_batching_outermost(fn.fn), fn.wrt, fn.outs)
        case Vjp():
            return _vjp_of_batch(_batching_outermost(fn.fn), fn.wrt, fn.outs)
    return fn


# (x, dx) -> Df(x) dx  of a batch is the batch of this map, also for a sum over the batch, which is linear.
def _jvp_of_batch(fn: Batched | TorchFunction, wrt: tuple[int, ...], outs: tuple[int, ...]) -> Batched | TorchFunction:
    if not isinstance(fn, Batched):
        return Jvp(fn, wrt, outs)
    return Batched(
        Jvp(fn.source, wrt, outs),
        _jvp_of_batch(fn.inner, wrt, outs),
        (*fn.in_dims, *(fn.in_dims[i] for i in wrt)),
        tuple(fn.out_dims[o] for o in outs),
        fn.size,
    )


# (x, ct) -> ct Df(x)  of a batch: the gradient of an argument that all rows share is the sum of the rows' gradients.
# All rows share the cotangent of a result that is a sum.
def _vjp_of_batch(fn: Batched | TorchFunction, wrt: tuple[int, ...], outs: tuple[int, ...]) -> Batched | TorchFunction:
    if not isinstance(fn, Batched):
        return Vjp(fn, wrt, outs)
    cotangent_dims = [None if (dim := fn.out_dims[o]) == "sum" else dim for o in outs]
    return Batched(
        Vjp(fn.source, wrt, outs),
        _vjp_of_batch(fn.inner, wrt, outs),
        (*fn.in_dims, *cotangent_dims),  # type: ignore[arg-type]
        tuple("sum" if (dim := fn.in_dims[i]) is None else dim for i in wrt),
        fn.size,
    )


def _run_of(fn: Batched | TorchFunction, kernels: bool) -> Run:
    if isinstance(fn, Batched):
        return _batched_run(fn, kernels)
    if isinstance(fn, ProgramPart):
        return jaxpr_as_fun(fn.program)
    has_choices = fn.base.islands in ("auto", "faster") and not kernels
    if has_choices and not may_be_tuned():
        tuning.note_untuned("all operators")
    return Interpretation(
        graph_of(fn),
        fn.base.name,
        fn.seed if isinstance(fn, GraphFunction) else fn.base.seed_position,
        kernels=kernels,
        blocks=fn.base.repeated_blocks,
        islands_of=fn.base if fn.base.islands in ("auto", "needed") else None,
        choices_of=fn.base if has_choices else None,
    )


def _batched_run(fn: Batched, kernels: bool) -> Run:
    row = _run_of(fn.inner, kernels)

    def run(*arrays: Any) -> list[Any]:
        if fn.size == 0:
            return [_of_no_rows(type_, dim) for type_, dim in zip(fn.source.out_types, fn.out_dims, strict=True)]
        columns = jax.vmap(row, in_axes=fn.in_dims, out_axes=0, axis_size=fn.size)(*arrays)
        return [_place_batch(column, dim) for column, dim in zip(columns, fn.out_dims, strict=True)]

    return run


def _place_batch(column: jax.Array, dim: int | str) -> jax.Array:
    if dim == "sum":
        return jnp.sum(column, axis=0, dtype=column.dtype)
    return jnp.moveaxis(column, 0, int(dim))


def _of_no_rows(type_: Any, dim: int | str) -> jax.Array:
    shape = type_.shape if dim == "sum" else (*type_.shape[: int(dim)], 0, *type_.shape[int(dim) :])
    return jnp.zeros(shape, type_.dtype)


def graph_of(fn: TorchFunction) -> fx.GraphModule:
    """Return the functional ATen graph of a torch function that is not batched, if all operators can be translated.

    Raises:
        TranslationError: torch cannot trace the function, or an operator has neither a lowering nor a decomposition.
    """
    module = aten_graph(fn)
    if fn.base.traits.has_dynamic_sizes:
        with forgetting_graph_sources():
            module = with_regions(module)
    reason = missing_lowering_reason(module, islands=fn.base.islands in ("auto", "needed"))
    if reason is not None:
        raise TranslationError(f"`{fn.base.name}`: {reason}")
    return module
