"""The entry of eager calls: from the arguments of a wrapped function to a run of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import numpy as np
import torch

from jtbridge._compat import ArrayImpl, Context, concrete_values, current_context
from jtbridge.core import random_numbers
from jtbridge.core.array_types import ArrayType
from jtbridge.core.dtypes import argument_dtypes
from jtbridge.core.functions import TracedFunction
from jtbridge.core.nested_calls import setting_inside
from jtbridge.core.output_shapes import check_declared, declared_types
from jtbridge.core.signature import Signature, argument_names, rebuild_call, static_arguments
from jtbridge.errors import DeviceError

from ._arrays import unshareable_reason
from ._common import run
from ._direct import only_device
from ._forward import eager_call_p
from ._function import EagerFunction

_SEED = ArrayType(random_numbers.SEED_SHAPE, np.dtype(np.uint32))
_INT32 = np.dtype(np.int32)


def has_torch_devices(arrays: list[Any]) -> bool:
    """Return whether torch can use all arrays of an eager call, including the arrays behind tracers."""
    values = (value for x in arrays for value in concrete_values(x))
    return all(unshareable_reason(value) is None for value in values if isinstance(value, ArrayImpl))  # no numbers


def _refuse_several_devices(arrays: list[Any], names: Callable[[], tuple[str, ...]], name: str) -> None:
    """Raise if arrays are committed to different devices, as JAX does."""
    if only_device() is not None:
        return
    first: tuple[int, Any] | None = None
    for i, array in enumerate(arrays):
        for value in concrete_values(array)[:1]:  # only the primal: a tangent may be on another device
            if not isinstance(value, ArrayImpl) or not value.committed:
                continue
            if first is None:
                first = i, value.device
            elif value.device != first[1]:
                raise DeviceError(
                    f"The arguments of `{name}` lie on different devices: `{names()[first[0]]}` on {first[1]}, "
                    f"`{names()[i]}` on {value.device}. Move them to one device with `jax.device_put`."
                )


def call_now(
    fn: Callable[..., Any],
    name: str,
    arrays: list[Any],
    signature: Signature,
    *,
    rng: Any,
    keep_int32: bool,
    return_mutated: bool,
    output_shapes: Any,
    warnings_given: set[str],
    clean_runs: set[Any],
    capture: Callable[[Signature, bool], TracedFunction],
) -> Any:
    """Run a torch function on the arguments of an eager call, which may be the tracers of grad, jvp and vmap.

    Args:
        fn: the torch function.
        name: the function's name, for messages.
        arrays: the array arguments of the call.
        signature: the signature of the call.
        rng: a JAX key, or None to draw from torch's own generators.
        keep_int32: whether `fn` gets int32 arrays as int32 tensors.
        return_mutated: whether to return the new values of mutated arguments too.
        output_shapes: a tree of the shapes and dtypes that the result must have, or None.
        warnings_given: keys of the warnings already given about the function.
        clean_runs: the kinds of batches and derivatives whose last run succeeded without side effects.
        capture: makes the traced function from a signature and whether the call has a key.

    Returns:
        The result; NotImplemented if an array is on several devices or on a device that torch does not have.

    Raises:
        DeviceError: the arrays are committed to different devices.
        OutputMismatchError: the types of the results are not those of `output_shapes`.
    """
    declared = None if output_shapes is None else declared_types(output_shapes)[0]
    if not has_torch_devices(arrays):
        return NotImplemented
    _refuse_several_devices(arrays, lambda: argument_names(fn, signature), name)
    types = tuple(ArrayType(shape, dtype) for shape, dtype in signature.types)
    names = argument_names(fn, signature) if return_mutated else None
    dtypes = argument_dtypes(
        (t.dtype for t in types), lambda: argument_names(fn, signature), name, keep_int32=keep_int32
    )
    casts = tuple(
        (i, torch.int64) for i, dtype in enumerate(dtypes) if dtype is torch.int64 and types[i].dtype == _INT32
    )
    seeded = rng is not None
    operands = [*arrays, random_numbers.seed_from_key(rng)] if seeded else arrays
    function = EagerFunction(
        name,
        setting_inside(rebuild_call(fn, signature)),
        (*types, _SEED) if seeded else types,
        casts,
        seeded=seeded,
        argument_names=names,
        capture=lambda: capture(signature, seeded),
        warnings_given=warnings_given,
        clean_runs=clean_runs,
        roots=lambda: (("", fn), *static_arguments(fn, signature)),
    )
    if current_context() is Context.EAGER and not any(isinstance(x, jax.core.Tracer) for x in operands):
        results = run(function, operands)
    else:
        results = eager_call_p.bind(*operands, fn=function)
    if declared is not None:
        check_declared(declared, function.out_types[: len(function.out_types) - len(function.mutated)], name)
    return function.unflatten(results)
