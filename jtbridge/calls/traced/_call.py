"""Calls of a wrapped function inside a traced program, and the caches of its traced functions."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
import torch

from jtbridge._backends import called_device, may_have_islands, translates, uses_kernels
from jtbridge._compat import TRACING, Context, current_context, outermost_trace
from jtbridge.capture import TraceRequest, closed_over_modules, device_closed_over, infer
from jtbridge.core import random_numbers
from jtbridge.core.array_types import ArrayType
from jtbridge.core.backend_names import WITHOUT_KERNELS
from jtbridge.core.dtypes import argument_dtypes, canonical_dtype
from jtbridge.core.functions import TracedFunction
from jtbridge.core.gpu_memory import GPU_PLATFORMS
from jtbridge.core.module_locks import module_locks
from jtbridge.core.nested_calls import setting_inside
from jtbridge.core.signature import (
    Signature,
    argument_names,
    parameter_names,
    rebuild_call,
    static_arguments,
    static_name,
)
from jtbridge.core.torch_state import TorchState
from jtbridge.errors import BackendError, JtbridgeError
from jtbridge.primitives import torch_call, torch_ordered, with_devices
from jtbridge.state import StateGuard, saving_state_once
from jtbridge.translate import example_shapes, is_symbolic, symbolic_program, torch_symbolic, with_constants
from jtbridge.triton import with_intercepted_launches

from ._batched import batched_inputs
from ._known_values import NONE_KNOWN, known_array_values, with_values
from ._literals import warn_of_literals
from ._retracing import NumberWatch
from ._verify import verify as verify_result

_MAX_TRACED = 512  # traced functions in a cache; a compiled program keeps its traced functions alive
# What each value of the option `islands` becomes for a function that draws random numbers.
_WHEN_DRAWING = {"auto": "faster", "needed": "never"}
_SEED = ArrayType(random_numbers.SEED_SHAPE, np.dtype(np.uint32))

_Cache = collections.OrderedDict[Any, TracedFunction]


class TracedCalls:
    """Traced functions of one wrapped function.

    Args:
        fn: the torch function.
        name: the name of the function, for messages.
        options: the options of :func:`jtbridge.wrap`.
        warnings_given: keys of the warnings already given about the function.
    """

    def __init__(self, fn: Callable[..., Any], name: str, options: dict[str, Any], warnings_given: set[str]):
        self._fn = fn
        self._name = name
        self._options = options
        self._ordered = options["effects"] == "ordered"
        self._warnings_given = warnings_given
        self._numbers = NumberWatch()
        # Caches of traced functions: one for each outermost JAX trace, as long as that trace lasts; and one for eager
        # calls of a backend that translates, until `clear`.
        self._by_trace: weakref.WeakKeyDictionary[Any, _Cache] = weakref.WeakKeyDictionary()
        self.outside_traces: _Cache = collections.OrderedDict()
        # For each outermost trace, the signatures for which the function needs known values: see `_known_values.py`.
        self._needing_values: weakref.WeakKeyDictionary[Any, set[Signature]] = weakref.WeakKeyDictionary()

    def call(
        self, arrays: list[Any], signature: Signature, rng: Any, *, backend: str, islands: str, verify: bool
    ) -> Any:
        """Call the function as part of a traced program.

        Args:
            arrays, signature: the arguments of the call.
            rng: a JAX key, or None.
            backend: the name of the backend that runs the function.
            islands: the option `islands` of :func:`jtbridge.wrap`.
            verify: whether the first result of each program is compared with torch's.
        """
        known = (
            known_array_values(arrays) if outermost_trace() is not None and not self._options["batched"] else NONE_KNOWN
        )
        traced, operands = self.prepared(arrays, signature, rng, backend, islands, known)
        if traced.symbolic is not None:
            results = torch_symbolic(*operands, name=self._name, program=traced.symbolic)
        elif self._ordered:
            results = torch_ordered(*operands, fn=traced)
        else:
            results = torch_call(*with_devices(operands, traced, backend), fn=traced, backend=backend)
            if verify:
                verify_result(traced, operands, results)
        count = len(traced.out_tree.array_positions)
        out = traced.out_tree.unflatten(results[:count])
        if torch.Size in map(type, traced.out_tree.statics) and current_context() is not Context.EAGER:
            out = jax.tree.map(lambda leaf: tuple(leaf) if type(leaf) is torch.Size else leaf, out)  # not a JAX type
        if not traced.return_mutated:
            return out
        names = [traced.argument_names[i] for i in traced.traits.effects.mutated]
        return out, dict(zip(names, results[count:], strict=True))

    def prepared(
        self,
        arrays: list[Any],
        signature: Signature,
        rng: Any,
        backend: str,
        islands: str,
        known: Mapping[int, np.ndarray] = NONE_KNOWN,
    ) -> tuple[TracedFunction, list[jax.Array]]:
        """Return the traced function for a call, and the flat arrays to call it with.

        Args:
            arrays, signature, rng, backend, islands: see `call`.
            known: the values of some arrays by position, for a function that can only be traced with known values.
        """
        if any(is_symbolic(shape) for shape, _ in signature.types):
            traced = self._trace_symbolic(signature, rng is not None, backend)
            return traced, [*arrays, random_numbers.seed_from_key(rng)] if traced.seeded else arrays
        cache = self._cache(arrays, backend)
        traced, unknown = self._with_known_if_needed(
            arrays, signature, known, lambda call: self._lookup(cache, call, rng is not None, backend, islands)
        )
        operands = [*unknown, *traced.constant_arrays]
        if traced.seeded:
            operands.append(random_numbers.seed_from_key(rng))
        return traced, operands

    def _with_known_if_needed(
        self,
        arrays: list[Any],
        signature: Signature,
        known: Mapping[int, np.ndarray],
        look_up: Callable[[Signature], TracedFunction],
    ) -> tuple[TracedFunction, list[Any]]:
        """Return the traced function of a call, with the known values if it needs them, and its array arguments."""
        trace = outermost_trace()
        needing: set[Signature] = self._needing_values.setdefault(trace, set()) if trace is not None else set()

        def with_known(*, called: bool) -> tuple[TracedFunction, list[Any]] | None:
            """Return the trace with the known values; None if it fails, or is untraceable and `called` is false."""
            with contextlib.suppress(JtbridgeError):
                found = look_up(with_values(signature, known, self._torch_dtypes(signature)))
                if called or found.traits.untraceable_reason is None:
                    needing.add(signature)
                    return found, [x for position, x in enumerate(arrays) if position not in known]
            return None

        if known and signature in needing and (found := with_known(called=True)) is not None:
            return found
        try:
            traced = look_up(signature)
        except JtbridgeError:
            if known and (found := with_known(called=True)) is not None:
                return found
            raise
        if known and traced.traits.untraceable_reason is not None and (found := with_known(called=False)) is not None:
            return found
        return traced, arrays

    def clear(self) -> None:
        """Drop the traced functions of eager calls."""
        self.outside_traces.clear()

    def _cache(self, arrays: Sequence[Any], backend: str) -> _Cache:
        """Return the cache of traced functions for this call: that of the outermost JAX trace, or of eager calls."""
        trace = outermost_trace()
        if trace is not None:
            return self._by_trace.setdefault(trace, collections.OrderedDict())
        if backend == "auto" and (len(arrays) == 0 or _on_torch_platform(arrays)):
            return collections.OrderedDict()  # state may have changed by the next eager call
        return self.outside_traces

    def _lookup(self, cache: _Cache, signature: Signature, seeded: bool, backend: str, islands: str) -> TracedFunction:
        state = TorchState.current()
        translating = translates(backend) and not self._ordered
        fuses = translating and uses_kernels(backend)
        islands = self._islands(islands, backend) if translating else "never"
        device = device_closed_over(self._fn) if self._ordered else called_device(backend)
        key = (signature, state, seeded, translating, fuses, islands, device, canonical_dtype(np.dtype(np.int64)))
        traced = cache.get(key)
        # State may change between two calls in one trace. An eager call of a backend that translates keeps its trace.
        if traced is None or (cache is not self.outside_traces and traced.guard.has_changed()):
            with saving_state_once():
                traced = self._trace(signature, state, seeded, fuses_chains=fuses, islands=islands, device=device)
                cache[key] = traced = with_constants(traced) if translating else traced
                traced.guard.remember()
            if traced.constants:
                warn_of_literals(self._name, self._warnings_given)
            while len(cache) > _MAX_TRACED:
                cache.popitem(last=False)
        elif cache is self.outside_traces:
            cache.move_to_end(key)
        return traced

    def _islands(self, option: str, backend: str) -> str:
        """Return the option `islands` for the programs of a backend on JAX's default platform."""
        if option == "never" or self._options["batched"] or not may_have_islands(jax.default_backend()):
            return "never"
        return "never" if option == "auto" and backend != "auto" else option

    def _trace_symbolic(self, signature: Signature, seeded: bool, backend: str) -> TracedFunction:
        """Trace the function with an example of each symbolic size, and make one program for all sizes."""
        if not translates(backend) or self._ordered:
            option = 'effects="ordered"' if self._ordered else f'backend="{backend}"'
            raise BackendError(
                f"`{self._name}` was given symbolic sizes, which only a translated function can have: "
                f'{option} calls torch. Use `backend="{WITHOUT_KERNELS}"` alone.'
            )
        shapes = [shape for shape, _ in signature.types]
        types_ = tuple(zip(example_shapes(shapes), (dtype for _, dtype in signature.types), strict=True))
        try:
            traced = self._trace(dataclasses.replace(signature, types=types_), TorchState.current(), seeded)
        except Exception as error:
            like = {
                str(size): example
                for shape, (examples, _) in zip(shapes, types_, strict=True)
                for size, example in zip(shape, examples, strict=True)
                if not isinstance(size, int)
            }
            sizes = ", ".join(f"{name} = {example}" for name, example in like.items())
            error.add_note(f"`{self._name}` was traced for examples of the symbolic sizes: {sizes}.")
            raise
        program = symbolic_program(traced, [*shapes, random_numbers.SEED_SHAPE] if traced.seeded else shapes)
        return dataclasses.replace(traced, symbolic=program)

    def capture(self, signature: Signature, seeded: bool) -> TracedFunction:
        """Trace the function for an eager call. If the call has a key, the seed is an input even without draws."""
        fuses = uses_kernels("auto")
        device = called_device("auto")
        return self._trace(signature, TorchState.current(), seeded, keep_seed=True, fuses_chains=fuses, device=device)

    def _trace(
        self,
        signature: Signature,
        state: TorchState,
        seeded: bool,
        *,
        keep_seed: bool = False,
        fuses_chains: bool = False,
        islands: str = "never",
        device: str = "cpu",
    ) -> TracedFunction:
        """Trace the function.

        Args:
            signature: the signature of the call.
            state: torch's settings to trace under.
            seeded: whether the call has a key.
            keep_seed: whether the seed stays an input if the function draws nothing.
            fuses_chains: whether chains of operators are fused for kernels when the function is captured.
            islands: which operators torch may run inside translated programs: see `TracedFunction`.
            device: the type of the device that called graphs are captured for.
        """
        self._numbers.see(
            self._name,
            lambda position: static_name(self._fn, signature, position),
            signature.tree,
            signature.keys,
            signature.types,
            signature.statics,
        )
        request = self._request(signature, state, seeded, regions=islands == "needed")
        with TRACING, contextlib.ExitStack() as stack:
            for lock in module_locks(closed_over_modules(self._fn)):  # XLA's threads may be calling the modules
                stack.enter_context(lock)
            found = infer(request)
        if found.traits.untraceable_reason is None and found.traits.effects.random_operator is not None:
            request.guard.refuse_cached_draws()
        traits, call = found.traits, request.call
        in_types = tuple(ArrayType(shape, np.dtype(dtype)) for shape, dtype in signature.types)
        names = argument_names(self._fn, signature)
        draws = traits.effects.random_operator is not None or (
            traits.untraceable_reason is not None and not traits.has_dynamic_sizes
        )
        seeded = seeded and (draws or keep_seed)
        return_mutated = self._options["return_mutated"]
        types = {**dict(enumerate(in_types)), **dict(traits.effects.reshaped)}
        mutated = tuple(types[i] for i in traits.effects.mutated) if return_mutated else ()
        out_types = (*found.out_types, *mutated)
        batched = batched_inputs(
            self._name, self._options["batched"], parameter_names(self._fn), names, in_types, out_types
        )
        return TracedFunction(
            name=self._name,
            # An untraceable function may launch kernels in a call that inference has not seen.
            call=with_intercepted_launches(call) if traits.effects.launches or traits.untraceable_reason else call,
            argument_names=names,
            in_types=(*in_types, _SEED) if seeded else in_types,
            in_torch_dtypes=request.dtypes,
            out_types=out_types,
            out_tree=found.out_tree,
            trace_state=state if traits.uses_default_dtype else state.for_any_default_dtype(),
            traits=traits,
            seeded=seeded,
            return_mutated=return_mutated,
            residuals=self._options["residuals"],
            repeated_blocks=self._options["repeated_blocks"],
            warnings_given=self._warnings_given,
            guard=request.guard,
            trials=found.trials,
            batched=batched,
            fuses_chains=fuses_chains,
            # If only the gradient had to be called, torch would draw other numbers for it than XLA drew for the value.
            islands=_WHEN_DRAWING.get(islands, islands) if seeded else islands,
            device=device,
        )

    def _request(self, signature: Signature, state: TorchState, seeded: bool, *, regions: bool) -> TraceRequest:
        """Return the input of inference for a call: the function, the types of its arguments, a guard of its state."""
        guard = StateGuard(
            self._name,
            (("", self._fn), *static_arguments(self._fn, signature)),
            self._options["purity"],
            ordered=self._ordered,
            warnings_given=self._warnings_given,
        )
        return TraceRequest(
            name=self._name,
            call=setting_inside(rebuild_call(self._fn, signature)),
            shapes=tuple(shape for shape, _ in signature.types),
            dtypes=self._torch_dtypes(signature),
            state=state,
            seeded=seeded,
            ordered=self._ordered,
            output_shapes=self._options["output_shapes"],
            device=device_closed_over(self._fn),
            regions=regions,
            guard=guard,
        )

    def _torch_dtypes(self, signature: Signature) -> tuple[torch.dtype, ...]:
        return argument_dtypes(
            (dtype for _, dtype in signature.types),
            lambda: argument_names(self._fn, signature),
            self._name,
            keep_int32=self._options["int32"] == "keep",
        )


def _on_torch_platform(arrays: Sequence[Any]) -> bool:
    """Return whether all arrays lie on devices of platforms that torch has here."""
    found = {device.platform for x in arrays if not isinstance(x, jax.core.Tracer) for device in x.devices()}
    return found <= ({"cpu", *GPU_PLATFORMS} if torch.cuda.is_available() else {"cpu"})
