"""The decorator: :func:`jtbridge.wrap`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from . import _rng
from ._compat import TRACING, unwrap_compiled
from ._config import backend_or
from ._dtypes import canonical_dtype, torch_dtype
from ._flat import ArrayType, FlatFunction, module_locks
from ._signature import (
    Signature,
    argument_names,
    closed_over_modules,
    device_closed_over,
    flatten_arguments,
    rebuild_call,
)
from ._torch_state import TorchState
from .backends import check_name, translates
from .capture import Request, infer
from .errors import ArgumentError, BackendError
from .launches import with_launches
from .primitives import torch_call, torch_ordered
from .translate import constant_array, hinted_shapes, is_symbolic, symbolic_program, torch_symbolic, with_constants

_MAX_PLANS = 512  # signatures kept per wrapped function; compiled programs hold on to their own
_SEED = ArrayType(_rng.SEED_SHAPE, np.dtype(np.uint32))


class Wrapped:
    """A torch function as a JAX function. Made by :func:`jtbridge.wrap`."""

    def __init__(self, fn: Callable[..., Any], options: dict[str, Any]):
        functools.update_wrapper(self, fn, updated=())
        if not _has_signature(fn):
            self.__signature__ = inspect.Signature(
                [
                    inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
                    inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
                ]
            )
        self._prefix: tuple[Any, ...] = ()
        self._keywords: dict[str, Any] = {}
        while isinstance(fn, functools.partial):  # its arrays are arguments, not constants
            self._prefix = fn.args + self._prefix
            self._keywords = {**fn.keywords, **self._keywords}
            fn = fn.func
        self._fn = unwrap_compiled(fn)
        self._name = _name_of(self._fn)
        self._takes_rng = _has_parameter(self._fn, "rng")
        self._options = options
        self._notices: set[str] = set()  # what was said of this function already
        self._plans: collections.OrderedDict[Any, FlatFunction] = collections.OrderedDict()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan, operands = self.prepared(args, kwargs)
        if plan.symbolic is not None:
            results = torch_symbolic(*operands, program=plan.symbolic)
        elif self.ordered:
            results = torch_ordered(*operands, fn=plan)
        else:
            results = torch_call(*operands, fn=plan, backend=self.backend)
        count = len(plan.out_tree.array_positions)
        out = plan.out_tree.unflatten(results[:count])
        if not plan.return_mutated:
            return out
        names = [plan.argument_names[i] for i in plan.behaviour.mutated]
        return out, dict(zip(names, results[count:], strict=True))

    @property
    def function(self) -> Callable[..., Any]:
        """The torch function, without the arguments that a ``functools.partial`` fixed."""
        return self._fn

    @property
    def backend(self) -> str:
        """The backend that is asked for, here and now."""
        return backend_or(self._options["backend"])

    @property
    def ordered(self) -> bool:
        """Whether its side effects are kept in order."""
        return self._options["effects"] == "ordered"

    def prepared(self, args: tuple, kwargs: dict[str, Any]) -> tuple[FlatFunction, list[jax.Array]]:
        """The plan for a call, and the flat arrays it is to be called with."""
        rng = None if self._takes_rng else kwargs.pop("rng", None)
        args, kwargs = (*self._prefix, *args), {**self._keywords, **kwargs}
        arrays, signature = flatten_arguments(self._name, args, kwargs)
        if any(is_symbolic(shape) for shape, _ in signature.types):
            plan = self._symbolic_plan(signature, rng is not None)
            return plan, [*arrays, _rng.seed_from_key(rng)] if plan.seeded else arrays
        plan = self._plan(signature, rng is not None, translates(self.backend) and not self.ordered)
        operands = [*arrays, *map(constant_array, plan.constants)]
        if plan.seeded:
            operands.append(_rng.seed_from_key(rng))
        return plan, operands

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<jtbridge.wrap of {self._name}>"

    def _plan(self, signature: Signature, seeded: bool, translating: bool) -> FlatFunction:
        state = TorchState.current()
        key = (signature, state, seeded, translating, canonical_dtype(np.dtype(np.int64)))
        plan = self._plans.get(key)
        if plan is None or not plan.holds():
            plan = self._make_plan(signature, state, seeded)
            self._plans[key] = plan = with_constants(plan, self._fn) if translating else plan
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan

    def _symbolic_plan(self, signature: Signature, seeded: bool) -> FlatFunction:
        """For sizes that are symbols: made for an example of each, with a program for all of them."""
        if not translates(self.backend) or self.ordered:
            raise BackendError(
                f"`{self._name}` was given symbolic sizes, which only a translated function can have: "
                f'backend="{self.backend}" calls torch.'
            )
        shapes = [shape for shape, _ in signature.types]
        types_ = tuple(zip(hinted_shapes(shapes), (dtype for _, dtype in signature.types), strict=True))
        plan = self._make_plan(dataclasses.replace(signature, types=types_), TorchState.current(), seeded)
        plan.symbolic = symbolic_program(plan, [*shapes, _rng.SEED_SHAPE] if plan.seeded else shapes)
        return plan

    def _make_plan(self, signature: Signature, state: TorchState, seeded: bool) -> FlatFunction:
        names = argument_names(self._fn, signature)
        call = rebuild_call(self._fn, signature)
        in_types = tuple(ArrayType(shape, np.dtype(dtype)) for shape, dtype in _known_types(signature, names))
        dtypes = tuple(self._torch_dtype(t, name) for t, name in zip(in_types, names, strict=True))
        request = Request(
            name=self._name,
            call=call,
            shapes=tuple(t.shape for t in in_types),
            dtypes=dtypes,
            state=state,
            seeded=seeded,
            ordered=self._options["effects"] == "ordered",
            output_shapes=self._options["output_shapes"],
            device=device_closed_over(self._fn),
        )
        with TRACING, contextlib.ExitStack() as stack:
            for lock in module_locks(closed_over_modules(self._fn)):  # a call of it may be running on XLA's threads
                stack.enter_context(lock)
            found = infer(request)
        behaviour = found.behaviour
        seeded = seeded and (behaviour.random_operator is not None or behaviour.opaque is not None)
        return_mutated = self._options["return_mutated"]
        mutated = tuple(in_types[i] for i in behaviour.mutated) if return_mutated else ()
        return FlatFunction(
            name=self._name,
            # Of what an opaque function launches in a call, looking at it may have shown nothing.
            call=with_launches(call) if behaviour.launches or behaviour.opaque else call,
            argument_names=names,
            in_types=(*in_types, _SEED) if seeded else in_types,
            in_torch_dtypes=dtypes,
            out_types=(*found.out_types, *mutated),
            out_tree=found.out_tree,
            trace_state=state,
            behaviour=behaviour,
            seeded=seeded,
            return_mutated=return_mutated,
            residuals=self._options["residuals"],
            notices=self._notices,
        )

    def _torch_dtype(self, type_: ArrayType, name: str) -> torch.dtype:
        narrow = canonical_dtype(np.dtype(np.int64)) == np.dtype(np.int32)
        if narrow and self._options["int32"] == "int64" and type_.dtype == np.dtype(np.int32):
            return torch.int64
        return torch_dtype(type_.dtype, f"argument `{name}` of `{self._name}`")


def wrap(
    fn: Callable[..., Any] | None = None,
    *,
    backend: str = "auto",
    output_shapes: Any = None,
    residuals: str = "save",
    return_mutated: bool = False,
    effects: str | None = None,
    int32: str = "int64",
) -> Any:
    """Make a PyTorch function a JAX function.

    The result works eagerly and under ``jit``, ``vmap``, ``grad``, ``vjp``, ``jvp``, ``linearize``, ``hessian``,
    ``checkpoint``, ``scan``, ``while_loop``, ``cond``, ``map`` and ``shard_map``, in any nesting and to any order.
    Gradients are torch's own. JAX arrays are never written to.

    Called with any JAX pytree of arguments: JAX arrays (tracers included), NumPy arrays and torch tensors reach
    `fn` as tensors of the same shape; every other leaf (Python numbers, strings, None, modules, ...) reaches it
    as it is and must be hashable. A call may pass ``rng=``, a JAX key, which makes random operators a pure
    function of it. Shapes and dtypes may change from call to call. Tensors and modules `fn` closes over are
    constants.

    Args:
        fn: any callable of tensors: a function, lambda, method, ``functools.partial``, ``nn.Module``, TorchScript
            function or module, ``torch.compile``'d function (its original is called), or
            ``torch.export.ExportedProgram``, such as ``torch.export.load("model.pt2")``.
        backend: "auto", or one of :func:`jtbridge.backends`.
        output_shapes: a tree of ``jax.ShapeDtypeStruct`` like the result, for functions whose output shapes cannot be
            found without running them.
        residuals: "save" runs the torch forward once in reverse mode and keeps what torch's partitioner decides
            as JAX arrays; "recompute" keeps the arguments only and runs the forward again.
        return_mutated: with True the result is ``(out, mutated)``, where `mutated` maps the name of every array
            argument that `fn` wrote to, such as ``x`` or ``params['w']``, to its new value. With False such writes
            stay inside.
        effects: "ordered" for functions that print, log, draw from torch's own generator or keep state: every
            call happens, in program order. Such a function cannot be differentiated or vmapped. To find the shapes of
            its results it also runs when it is traced, on tensors without values, or on zeros if it reads values; with
            `output_shapes` it does not.
        int32: while x64 is off JAX's integers are int32 where torch's are int64, so int32 arrays reach `fn` as
            int64. "keep" leaves them int32.

    Returns:
        A function of the same arguments that returns `fn`'s result with JAX arrays for tensors. Python numbers and
        other values that depend on shapes alone come back as they are.

    Raises:
        BackendError, ArgumentError, DTypeError: at once, for what cannot work.
        JtbridgeError: any other class of :mod:`jtbridge.errors`, when it is called.

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
        "return_mutated": return_mutated,
        "effects": _one_of("effects", effects, (None, "ordered")),
        "int32": _one_of("int32", int32, ("int64", "keep")),
    }
    if fn is None:
        return lambda function: Wrapped(_callable(function), options)
    return Wrapped(_callable(fn), options)


def as_wrapped(fn: Any) -> Wrapped:
    """A wrapped function as it is, any other callable wrapped."""
    if isinstance(fn, types.MethodType) and isinstance(fn.__func__, Wrapped):
        return wrap(functools.partial(fn.__func__, fn.__self__))
    return fn if isinstance(fn, Wrapped) else wrap(fn)


def _known_types(signature: Signature, names: tuple[str, ...]) -> Any:
    for (shape, dtype), name in zip(signature.types, names, strict=True):
        torch_dtype(dtype, f"argument `{name}`")
        yield shape, dtype


def _callable(fn: Any) -> Callable[..., Any]:
    if "torch.export" in sys.modules and isinstance(fn, torch.export.ExportedProgram):
        return fn.module()
    if not callable(fn):
        raise ArgumentError(f"`wrap` takes a callable, but got a {type(fn).__name__}.")
    return fn


def _one_of(name: str, value: Any, known: tuple[Any, ...]) -> Any:
    if value not in known:
        raise ArgumentError(f"`{name}` must be one of {', '.join(map(repr, known))}, but it is {value!r}.")
    return value


def _name_of(fn: Any) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__


def _has_signature(fn: Callable[..., Any]) -> bool:
    try:
        inspect.signature(fn)
    except (TypeError, ValueError):  # built-in torch functions have none
        return False
    return True


def _has_parameter(fn: Callable[..., Any], name: str) -> bool:
    return _has_signature(fn) and name in inspect.signature(fn).parameters
