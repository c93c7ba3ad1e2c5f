"""The decorator: :func:`jtbridge.wrap`."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch

from jtbridge._backends import check_name, translates
from jtbridge._compat import IMPORTED_BY_FAKE_TENSORS, Context, current_context, unwrap_compiled
from jtbridge.core.dtypes import argument_dtypes
from jtbridge.core.fork import check_not_forked
from jtbridge.core.imports import import_whole
from jtbridge.core.messages import kind_of
from jtbridge.core.nested_calls import is_inside, setting_inside
from jtbridge.core.partials import PartialCall
from jtbridge.core.pickling import reduce_value
from jtbridge.core.random_numbers import check_key
from jtbridge.core.signature import Signature, flatten_arguments, parameters_of
from jtbridge.errors import ArgumentError, JtbridgeError

from ._config import backend_or, check_islands, islands_or, verify_or
from .eager import call_directly, call_now

if TYPE_CHECKING:
    from jtbridge.core.functions import TracedFunction

    from .traced import TracedCalls


class Wrapped:
    """A torch function as a JAX function, made by :func:`jtbridge.wrap`."""

    def __init__(self, fn: Callable[..., Any], options: dict[str, Any]):
        functools.update_wrapper(self, fn, updated=())
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):  # a proxy has any attribute, of any type
            if not isinstance(vars(self).get(name), str | None):
                delattr(self, name)
        if parameters_of(fn) is None:
            self.__signature__ = inspect.Signature(
                [
                    inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
                    inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
                ]
            )
        fn = _unwrapped(fn)
        self._partial = PartialCall(fn, _unwrapped) if isinstance(fn, functools.partial) else None
        self._fn = self._partial or unwrap_compiled(fn)
        self._name = _shown_name(self.function)
        self._torch_function = setting_inside(self._fn)
        self._takes_rng = "rng" in (parameters_of(self._fn) or ())
        self._options = options
        # Whether no option asks for work before or after the call of torch: see `call_directly`.
        self._is_simple = not (
            self._partial or options["return_mutated"] or options["effects"] or options["output_shapes"] is not None
        )
        self._warnings_given: set[str] = set()  # keys of the warnings already given about this function
        self._clean_runs: set[Any] = set()  # see `row_by_row_if_needed`

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:  # `self` may be a keyword of the function
        if is_inside():
            return self._inside_torch(args, kwargs)
        check_not_forked(self._name)
        context = current_context()
        if context is Context.EAGER and self._is_simple and not kwargs and self.backend == "auto":
            result = call_directly(self._torch_function, self._name, args)
            if result is not NotImplemented:
                return result
        if context is Context.EAGER or (context is Context.TRANSFORMED and not self.ordered):
            result = self._call_eagerly(args, kwargs)
            if result is not NotImplemented:
                return result
        arrays, signature, rng = self.flattened(args, kwargs)
        verify = verify_or(self._options["verify"])
        try:
            return self._traced_calls.call(
                arrays, signature, rng, backend=self.backend, islands=self.islands, verify=verify
            )
        except JtbridgeError as error:
            by_name = self.backend != "auto" and translates(self.backend)
            if context is not Context.STAGED and not by_name and not self.ordered:
                error.add_note(
                    "This eager call is translated, as under `jax.jit`, because torch has no arrays on several devices "
                    "or on this device. For a call of torch itself: `jax.device_put(x, jax.devices('cpu')[0])`."
                )
            raise

    def _inside_torch(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the plain torch function, for a call by torch code inside a wrapped function."""
        if self._options["return_mutated"] or (not self._takes_rng and "rng" in kwargs):
            option = "return_mutated=True" if self._options["return_mutated"] else "rng="
            raise ArgumentError(
                f"`{self._name}` was called with `{option}` inside another wrapped function, where it is a plain torch "
                "function: arguments are written to in place, and draws are those of the outer call. Call "
                f"`{self._name}.function` there."
            )
        args, kwargs = self._with_fixed(args, kwargs)
        if _holds_arrays((args, kwargs)):
            raise ArgumentError(
                f"`{self._name}` was called with a JAX array inside another wrapped function, where it is a plain "
                "torch function. Pass a tensor. Code that Python runs in between, such as a signal handler or "
                "`__del__`, counts as inside too: let it compute later."
            )
        return self._fn(*args, **kwargs)

    def objects_of_the_user(self) -> list[tuple[str, Any]]:
        """Return the function that a call runs, so that an enclosing wrapped function's guard finds its state."""
        return [("", self._fn)]

    @property
    def function(self) -> Callable[..., Any]:
        """Return the torch function, without the arguments that a ``functools.partial`` fixed."""
        return self._fn if self._partial is None else self._partial.function

    @property
    def name(self) -> str:
        """Return the name of the torch function."""
        return self._name

    @property
    def runs(self) -> Callable[..., Any]:
        """Return the callable that takes the arguments of :meth:`flattened`: the function, or its `PartialCall`."""
        return self._fn

    @property
    def backend(self) -> str:
        """Return the name of the backend: from the enclosing ``config`` block, else from the option of ``wrap``."""
        return backend_or(self._options["backend"])

    @property
    def islands(self) -> str:
        """Return the option `islands`: from the enclosing ``config`` block, else from the option of ``wrap``."""
        return islands_or(self._options["islands"])

    @property
    def ordered(self) -> bool:
        """Return whether the function was wrapped with ``effects="ordered"``."""
        return self._options["effects"] == "ordered"

    @functools.cached_property
    def _traced_calls(self) -> TracedCalls:
        import_whole(IMPORTED_BY_FAKE_TENSORS, f"{__package__}.traced")
        from .traced import TracedCalls  # a slow import: it includes capture and translation

        return TracedCalls(self._fn, self._name, self._options, self._warnings_given)

    def prepared(self, args: tuple, kwargs: dict[str, Any]) -> tuple[TracedFunction, list[jax.Array]]:
        """Return the traced function for a call, and the flat arrays to call it with."""
        arrays, signature, rng = self.flattened(args, kwargs)
        return self._traced_calls.prepared(arrays, signature, rng, self.backend, self.islands)

    def flattened(self, args: tuple, kwargs: dict[str, Any]) -> tuple[list[jax.Array], Signature, Any]:
        """Return the flat arrays of a call, its signature, and its JAX key, or None if the call has no key."""
        rng = None if self._takes_rng else kwargs.pop("rng", None)
        if rng is not None:
            check_key(rng)
        return *flatten_arguments(self._fn, self._name, *self._with_fixed(args, kwargs)), rng

    def _with_fixed(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a call together with the arguments that a ``functools.partial`` fixes."""
        return (args, kwargs) if self._partial is None else self._partial.arguments(args, kwargs)

    def torch_dtypes(self, signature: Signature, names: tuple[str, ...]) -> tuple[torch.dtype, ...]:
        """Return the torch dtypes in which the arrays of a call reach the function."""
        dtypes = (np.dtype(dtype) for _, dtype in signature.types)
        return argument_dtypes(dtypes, lambda: names, self._name, keep_int32=self._options["int32"] == "keep")

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __copy__(self) -> Wrapped:
        return Wrapped(self.__wrapped__, self._options)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapped:
        return Wrapped(copy.deepcopy(self.__wrapped__, memo), self._options)  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        return reduce_value(self, Wrapped, self.__wrapped__, self._options)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"<jtbridge.wrap of {self._name}>"

    def clear_cache(self) -> None:
        """Forget the traces of this function. Its next call, and the next call of its `jax.jit`, read all state again.

        Programs of other functions that call this one are kept; `jax.clear_caches()` drops them.
        """
        if "_traced_calls" in self.__dict__:
            self._traced_calls.clear()
        jax.jit(self).clear_cache()  # type: ignore[attr-defined]  # JAX keeps the traces by function, for every `jax.jit` of it

    def _call_eagerly(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run torch on the arguments; return NotImplemented if the call is translated or torch lacks the device."""
        if self.backend != "auto" and translates(self.backend) and not self.ordered:
            return NotImplemented
        if self.ordered:
            jax.effects_barrier()  # wait for the ordered calls of compiled programs that still run
        arrays, signature, rng = self.flattened(args, dict(kwargs))
        return call_now(
            self._fn,
            self._name,
            arrays,
            signature,
            rng=rng,
            keep_int32=self._options["int32"] == "keep",
            return_mutated=self._options["return_mutated"],
            output_shapes=self._options["output_shapes"],
            warnings_given=self._warnings_given,
            clean_runs=self._clean_runs,
            capture=lambda signature, seeded: self._traced_calls.capture(signature, seeded),
        )


def wrap(
    fn: Callable[..., Any] | None = None,
    *,
    backend: str = "auto",
    output_shapes: Any = None,
    residuals: str = "save",
    repeated_blocks: str = "inline",
    islands: str = "auto",
    return_mutated: bool = False,
    effects: str | None = None,
    int32: str = "int64",
    verify: bool = False,
    purity: str = "error",
    batched: str | tuple[str, ...] = (),
) -> Any:
    """Make a PyTorch function a JAX function.

    The result works eagerly and under ``jit``, ``vmap``, ``grad``, ``vjp``, ``jvp``, ``linearize``, ``hessian``,
    ``checkpoint``, ``scan``, ``while_loop``, ``cond``, ``map`` and ``shard_map``, in any nesting and to any order.
    Gradients are torch's own. JAX arrays are never written to.

    The arguments of a call may be any JAX pytrees. JAX arrays (tracers included), NumPy arrays and torch tensors reach
    `fn` as tensors of the same shape. Every other leaf (Python numbers, strings, None, modules, ...) reaches `fn` as it
    is and must be hashable. A call may pass ``rng=``, a JAX key, which makes random operators a pure function of the
    key. Shapes and dtypes may change from call to call. Tensors and modules that `fn` closes over are constants. So are
    the values that a ``functools.partial`` fixes, except trees with JAX arrays, which are arguments of the call.

    Args:
        fn: any callable of tensors: a function, lambda, method, ``functools.partial``, ``nn.Module``, TorchScript
            function or module, ``torch.compile``'d function (its original is called), or
            ``torch.export.ExportedProgram``, such as ``torch.export.load("model.pt2")``.
        backend: "auto", or one of :func:`jtbridge.backends`.
        output_shapes: a tree of ``jax.ShapeDtypeStruct`` like the result, for functions whose output shapes cannot be
            found without running them.
        residuals: "save" runs the torch forward once in reverse mode and keeps the residuals that torch's partitioner
            chooses, as JAX arrays; "recompute" keeps only the arguments and runs the forward again.
        repeated_blocks: how equal blocks of the graph, such as the layers of a model, are translated. With "inline"
            every block is written out. With "call" they are one function that is called for each block: it is lowered
            once, and the compiled program is the same as with "inline". With "scan" they run in a `jax.lax.scan` over
            weights that are stacked in each call: the program is as small as that of one block, the stack takes
            memory, and results may be rounded differently.
        islands: whether torch runs single operators inside translated programs, in one call each, while XLA runs
            everything around them. With "needed" these are the operators without a lowering, and regions of operators
            with sizes that depend on data. With "auto" and ``backend="auto"``, they are the operators without a
            lowering and those that torch is measured to run faster than XLA; but if more than an eighth of the
            operators have no lowering, or a size depends on data, the whole function is called. With "auto" and a
            backend chosen by name there are no islands. With "never", a function with an operator that has no lowering
            is called as a whole. There are no islands in exported programs, on a TPU, and in programs that XLA divides
            among devices.
        return_mutated: with True the result is ``(out, mutated)``, where `mutated` maps the name of every array
            argument that `fn` wrote to, such as ``x`` or ``params['w']``, to its new value. With False the caller does
            not see such writes.
        effects: "ordered" for functions that print, log, draw from torch's own generator or keep state: every
            call happens, in program order. Such a function cannot be differentiated or vmapped. To find the shapes of
            its results, the function also runs when it is traced, on tensors without values, or on example arguments
            if it reads values, and the state that it reaches is restored. With `output_shapes` it does not run when it
            is traced.
        int32: while x64 is off, JAX uses int32 where torch uses int64, so int32 arrays reach `fn` as int64. With
            "keep" they stay int32.
        verify: with True the first result of every traced program is compared with torch's own for the same values, to
            within rounding. This finds a function that computes something else while it is traced. The comparison
            happens once, when the program runs: under ``jit`` by a callback to the host, under ``vmap`` for the first
            row, in a loop for the first step, under ``grad`` for the value and not the gradient. A difference raises
            `VerificationError`; a compiled program raises JAX's error with its text. Functions that draw random
            numbers, or that call JAX functions, are not compared.
        purity: the reaction if a function that is traced for ``jit``, ``scan`` and the like writes to state that it
            reaches (a closure, a global, an attribute, a list, an iterator), or draws from Python's or NumPy's global
            generator. "error" raises :class:`~jtbridge.errors.MutationError` or
            :class:`~jtbridge.errors.RandomnessError`, "warn" warns (:class:`~jtbridge.errors.PurityWarning`) and
            "allow" does neither. In each case the state is restored after the trace. :func:`jtbridge.purity` reports
            all side effects of a function.
        batched: the names of the arguments whose first axis is a batch of independent rows, which is then the first
            axis of each result too. If the function is called on several devices under plain ``jit`` (by the backend
            "dlpack"), each device calls it with its rows, and nothing is gathered. Its gradient runs the forward again.
            Rows must not depend on one another: jtbridge cannot check that. A function that draws from ``rng=`` is not
            divided, because the numbers of a row depend on its position in the batch.

    Returns:
        A function of the same arguments that returns `fn`'s result with JAX arrays in place of tensors. Python numbers
        and other values that depend only on shapes are returned unchanged.

    Raises:
        BackendError, ArgumentError: an option or `fn` is not valid.
        JtbridgeError: a call of the returned function may raise any class of :mod:`jtbridge.errors`.

    Example:
        >>> import jax, jax.numpy as jnp, jtbridge, torch
        >>> @jtbridge.wrap
        ... def f(x, y):
        ...     return torch.sin(x) * y
        >>> jax.jit(jax.vmap(jax.grad(f)))(jnp.zeros(3), jnp.arange(3.0))
        Array([0., 1., 2.], dtype=float32)
    """
    options = {
        "backend": check_name(backend),
        "output_shapes": output_shapes,
        "residuals": _one_of("residuals", residuals, ("save", "recompute")),
        "repeated_blocks": _one_of("repeated_blocks", repeated_blocks, ("inline", "call", "scan")),
        "islands": check_islands(islands),
        "return_mutated": _one_of("return_mutated", return_mutated, (True, False)),
        "effects": _one_of("effects", effects, (None, "ordered")),
        "int32": _one_of("int32", int32, ("int64", "keep")),
        "verify": _one_of("verify", verify, (True, False)),
        "purity": _one_of("purity", purity, ("error", "warn", "allow")),
        "batched": _names_in_option("batched", batched),
    }
    if fn is None:
        return lambda function: _wrap_function(function, options)
    return _wrap_function(fn, options)


def as_wrapped(fn: Any) -> Wrapped:
    """Return the wrapped function behind a callable, or wrap the callable if there is none.

    The callable may be a wrapped function, a ``jax.jit`` of one, or a `JaxModule`.
    """
    if fn is None:  # `wrap(None)` would return a decorator
        raise ArgumentError("Expected a function, but got None.")
    inner = fn
    while _is_jax_jitted(inner) and hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__  # type: ignore[attr-defined]
    if hasattr(type(inner), "__jtbridge_wrapped__"):
        return inner.__jtbridge_wrapped__()
    return inner if isinstance(inner, Wrapped) else wrap(fn)


def _wrap_function(fn: Any, options: dict[str, Any]) -> Any:
    """Wrap a function, or a ``staticmethod`` or ``classmethod`` over a function."""
    if isinstance(fn, staticmethod | classmethod):
        return type(fn)(Wrapped(_callable(fn.__func__), options))
    if isinstance(fn, property):
        raise ArgumentError("`wrap` takes a function, but got a property. Put `@property` above `@wrap`.")
    return Wrapped(_callable(fn), options)


def _unwrapped(fn: Any) -> Any:
    """Return the torch function under a wrapped function, without its options; other functions unchanged."""
    if isinstance(fn, types.MethodType) and isinstance(fn.__func__, Wrapped):
        fn = functools.partial(fn.__func__, fn.__self__)
    while isinstance(fn, Wrapped):
        fn = fn.__wrapped__  # type: ignore[attr-defined]
    return fn


def _callable(fn: Any) -> Callable[..., Any]:
    if "torch.export" in sys.modules and isinstance(fn, torch.export.ExportedProgram):
        return fn.module()
    if not callable(fn):
        raise ArgumentError(f"`wrap` takes a callable, but got {kind_of(fn)}.")
    if _is_jax_jitted(fn):
        raise ArgumentError(
            f"`wrap` takes a torch function, but `{_shown_name(fn)}` is a JAX function. Call it as it is; or, inside "
            "torch code, call `jtbridge.to_torch_function` of it."
        )
    kind = next((kind for is_kind, kind in _SUSPENDED if any(map(is_kind, _bodies(fn)))), None)
    if kind is not None:
        raise ArgumentError(
            f"`wrap` takes a function that returns its result, but `{_shown_name(_unwrapped(fn))}` is {kind}, which a "
            "JAX program cannot suspend and resume. Wrap a plain function, and await or iterate outside of it."
        )
    return fn


_SUSPENDED = (
    (inspect.iscoroutinefunction, "a coroutine function (`async def`)"),
    (inspect.isasyncgenfunction, "an asynchronous generator function"),
    (inspect.isgeneratorfunction, "a generator function (it has a `yield`)"),
)


def _bodies(fn: Any) -> list[Any]:
    """Return the functions that run when a callable is called."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = _unwrapped(fn)
    if isinstance(fn, torch.jit.ScriptModule):  # TorchScript has no coroutines and no generators
        return []
    if isinstance(fn, torch.nn.Module):
        return [type(fn).forward]
    return [fn] if isinstance(fn, types.FunctionType | types.MethodType) else [type(fn).__call__]


def _one_of(name: str, value: Any, known: tuple[Any, ...]) -> Any:
    if value not in known:
        raise ArgumentError(f"`{name}` must be one of {', '.join(map(repr, known))}, but it is {value!r}.")
    return value


def _holds_arrays(tree: Any) -> bool:
    try:
        return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
    except ValueError:  # JAX cannot sort the keys of a dict
        return False


def _is_jax_jitted(fn: Any) -> bool:
    """Return whether a callable is the result of ``jax.jit``, and not a mock that has the same methods."""
    return type(fn).__module__.partition(".")[0] in ("jax", "jaxlib") and isinstance(fn, jax.stages.Wrapped)


def _names_in_option(option: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"`{option}` must be the name of an argument, or a tuple of names, but it is {value!r}.")
    return tuple(names)


def _shown_name(fn: Any) -> str:
    name = getattr(fn, "__name__", None)
    return name if name and isinstance(name, str) else type(fn).__name__
