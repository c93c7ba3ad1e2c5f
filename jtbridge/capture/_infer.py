"""Inference of the result types and the traits of a torch function from the types of its arguments."""

from __future__ import annotations

import dataclasses

import torch

from jtbridge._compat import run_outside_transforms, was_answered_fake, watch_is_fake_tensor
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.errors import JtbridgeError, TranslationError
from jtbridge.triton.launches import may_need_late_scalars

from ._causes import reason_of
from ._request import AbstractResult, TraceRequest, Trial
from ._strategies import STRATEGIES


@run_outside_transforms
def infer(request: TraceRequest) -> AbstractResult:
    """Infer the result types and the traits of a function by the first strategy that succeeds.

    Raises:
        DataDependentShapeError: the output shape depends on values and `output_shapes` was not given.
        OutputMismatchError: `output_shapes` was given and is wrong.
        ShapeInferenceError: the function can neither be traced nor run on example arguments.
        RandomnessError: the function draws without a key.
        TranslationError: the function calls a higher-order operator that cannot be translated.
        MutationError: the function writes to a closed-over tensor.
    """
    request = request.on_device(request.device)
    watch_is_fake_tensor()
    was_answered_fake()  # discards the tests of earlier functions
    trials: list[Trial] = []
    cause: Exception | None = None
    for strategy in STRATEGIES:
        if not strategy.applies(request, cause):
            continue
        try:
            result = strategy.run(request, cause)
        except TranslationError:
            # Raised for a higher-order operator. The operator calls torch.compile, which inside a mode marks the
            # operator's frames as not compilable, so that later calls in torch would fail.
            torch.compiler.reset()
            raise
        except Exception as error:
            raise_if_from_signal(error)
            is_final = isinstance(error, JtbridgeError) and not (cause is None and may_need_late_scalars(error))
            if is_final or strategy is STRATEGIES[-1]:
                raise
            trials.append(Trial(strategy.name, reason_of(error)))
            cause = error if strategy.is_trace else cause
        else:
            return dataclasses.replace(result, trials=(*trials, Trial(strategy.name)))
    raise AssertionError("the last strategy applies to every function")
