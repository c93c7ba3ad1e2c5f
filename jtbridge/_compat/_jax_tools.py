"""Rules of primitives for JAX's tools checkify and jet, whose tables of rules are not public."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

_REFUSALS: dict[Any, Callable[..., NoReturn]] = {}


def add_nan_check(primitive: Any, describe: Callable[..., tuple[str, int]]) -> None:
    """Make the float checks of ``jax.experimental.checkify`` check the results of a primitive.

    Tried on jax 0.10.2 and 0.11.2; from 0.11 on, rules take a context first. The table of rules is not public. checkify
    assumes that a primitive without a rule returns no NaNs.

    Args:
        primitive: a primitive with several results.
        describe: takes the primitive's parameters; returns its name in error messages, and how many results to check.
    """
    from jax._src import checkify

    leading = 3 if hasattr(checkify, "CheckifyContext") else 2  # the context, the error, the enabled kinds of errors

    def rule(*args: Any, **params: Any) -> tuple[Any, Any]:
        results = primitive.bind(*args[leading:], **params)
        name, count = describe(**params)
        named = types.SimpleNamespace(name=name, multiple_results=True)
        return checkify.check_nans(named, *args[:leading], results[:count]), results  # type: ignore[call-arg]

    checkify.error_checks[primitive] = rule


def refuse_in_jet(primitive: Any, rule: Callable[..., NoReturn]) -> None:
    """Make ``jax.experimental.jet`` call `rule`, which raises, with the parameters of a primitive."""
    _REFUSALS[primitive] = lambda primals, series, **params: rule(**params)


def register_with_jet() -> None:
    """Register the rules of :func:`refuse_in_jet` with jet, if jet was imported.

    Tried on jax 0.10.2. The table of rules is not documented; jet raises a bare KeyError for a primitive without a
    rule. jet is not imported here, because the import takes time and most users do not need jet.
    """
    jet = sys.modules.get("jax.experimental.jet")
    if jet is not None:
        jet.jet_rules.update(_REFUSALS)
