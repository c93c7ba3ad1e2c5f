"""Runs of a torch function under the torch settings of its trace, and the errors of such runs."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence

import torch

from jtbridge._compat import FakeTensor
from jtbridge.errors import JtbridgeError, MutationError, TorchCallError, TranslationError

from . import random_numbers
from .array_types import Tensors, to_bytes
from .functions import TorchFunction
from .messages import in_utf8, text_of

_SHOWN = 6  # arguments that a message shows at each end of a long list


def escaped_tensor_error(name: str | None = None) -> MutationError:
    """Return the error for a use of a tensor that a function stored while it was traced.

    Args:
        name: the name of the function, if it is known where the tensor is used.
    """
    function = "A torch function" if name is None else f"`{name}`"
    return MutationError(
        f"{function} stored a tensor derived from its arguments while it was traced, and the tensor is read later. A "
        "JAX program does not keep state from one call to the next. Return the tensor and pass it to the next call, or "
        'wrap with `effects="ordered"` and `output_shapes=`, so that nothing is traced.'
    )


def unrecorded_tensor_error() -> TranslationError:
    """Return the error for a graph with a tensor that no operator in it computes."""
    return TranslationError(
        "its trace contains a tensor that torch did not record, such as the result of `as_subclass`, a tensor that "
        "another thread of the function computes, or a tensor that an earlier trace left"
    )


def runner(fn: TorchFunction, destinations: int = 0) -> Callable[[Callable[[], Sequence[torch.Tensor]]], Tensors]:
    """Return a function that runs `fn` on the tensors that its argument makes, under the torch settings of `fn`.

    The tensors are made under these settings too: a tensor made in inference mode cannot be differentiated outside it.

    Args:
        fn: the function.
        destinations: the number of tensors, the last ones, to which `fn` writes results.
    """
    call = _with_known_values(fn, len(fn.in_types) - destinations)
    state = fn.state
    is_active = state.activity_check()
    only_grad_is_off = not state.grad and not state.inference

    def run(inputs: Callable[[], Sequence[torch.Tensor]]) -> Tensors:
        if is_active():
            return call(*inputs())
        if only_grad_is_off:
            with torch.no_grad():
                if is_active():
                    return call(*inputs())
        with state.applied():
            return call(*inputs())

    return run


def _with_known_values(fn: TorchFunction, count: int) -> Callable[..., Tensors]:
    is_proven = fn.base.traits.custom_operator is None

    def call(*tensors: torch.Tensor) -> Tensors:
        nonlocal is_proven
        if is_proven:
            results = fn(*tensors)
        else:
            results, is_proven = _run_on_copies(fn, tensors, count), True
        if any(isinstance(result, FakeTensor) for result in results):
            raise escaped_tensor_error(fn.base.name)
        return results

    return call


def _run_on_copies(fn: TorchFunction, tensors: Sequence[torch.Tensor], count: int) -> Tensors:
    """Run a function with custom operators for the first time, on copies of its first `count` arguments on a CPU.

    Raises:
        MutationError: an operator wrote to a copy. Without the copy, it would have written to a JAX array.
        RandomnessError: an operator draws random numbers, and the trace of the function did not show it.
    """
    copies = [x.clone(memory_format=torch.preserve_format) if x.is_cpu else x for x in tensors[:count]]
    traits = fn.base.traits
    custom = traits.custom_operator
    assert custom is not None
    may_draw = traits.effects.ordered
    with contextlib.nullcontext() if may_draw else random_numbers.undeclared_refused(fn.base.name, custom):
        results = fn(*copies, *tensors[count:])
    for copy, tensor in zip(copies, tensors, strict=False):
        if not torch.equal(to_bytes(copy.detach()), to_bytes(tensor.detach())):
            raise MutationError(
                f"A custom operator of `{fn.base.name}`, such as `{custom}`, writes to an "
                "argument that its schema does not declare. Declare it in `mutates_args=`, or write to a `clone()`."
            )
    return results


def as_call_error(fn: TorchFunction, error: BaseException) -> JtbridgeError:
    """Return the error for a compiled program. XLA passes on only its text, so the text has the torch traceback."""
    if isinstance(error, JtbridgeError):
        return error
    lines = "".join(traceback.format_exception(error)).rstrip()
    return TorchCallError(
        in_utf8(
            f"`{fn.base.name}`, a torch function called from a JAX program with {describe_arguments(fn)}, raised "
            f"{type(error).__name__}: {text_of(error)}\n\nTorch traceback:\n{lines}"
        )
    )


def describe_arguments(fn: TorchFunction) -> str:
    """Describe the arguments of a function as `name: dtype[shape]`; of many arguments, the first and the last ones."""
    flat = fn.base
    parts = [
        f"{name}: {type_.dtype}{list(type_.shape)}"
        for name, type_ in zip(flat.argument_names, flat.in_types, strict=False)
    ]
    if len(parts) > 2 * _SHOWN:
        parts = [*parts[:_SHOWN], f"... {len(parts) - 2 * _SHOWN} more ...", *parts[-_SHOWN:]]
    return ", ".join(parts) or "no array arguments"
