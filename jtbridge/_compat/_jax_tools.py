"""How a primitive takes part in JAX's tools that have no public way in: checkify and jet."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

_REFUSALS: dict[Any, Callable[..., NoReturn]] = {}


def add_nan_check(primitive: Any, describe: Callable[..., tuple[str, int]]) -> None:
    """Let the float checks of ``jax.experimental.checkify`` look at the results of a primitive.

    Tried on jax 0.10.2. The table of rules is not public; a primitive that is not in it is taken to have no NaNs.

    Args:
        primitive: one of several results.
        describe: from its parameters to the name that an error message gives it, and how many results to check.
    """
    from jax._src import checkify

    def rule(error: Any, enabled_errors: Any, *operands: Any, **params: Any) -> tuple[Any, Any]:
        results = primitive.bind(*operands, **params)
        name, count = describe(**params)
        named = types.SimpleNamespace(name=name, multiple_results=True)
        return checkify.check_nans(named, error, enabled_errors, results[:count]), results

    checkify.error_checks[primitive] = rule


def refuse_in_jet(primitive: Any, rule: Callable[..., NoReturn]) -> None:
    """Have `rule`, called with the parameters of a primitive, raise where ``jax.experimental.jet`` meets it."""
    _REFUSALS[primitive] = lambda primals, series, **params: rule(**params)


def register_with_jet() -> None:
    """Give jet the rules of :func:`refuse_in_jet`, if somebody imported it.

    Tried on jax 0.10.2. The table of rules is not documented; jet raises a bare KeyError for what is not in it. Nobody
    who does not use jet has to wait for its import.
    """
    jet = sys.modules.get("jax.experimental.jet")
    if jet is not None:
        jet.jet_rules.update(_REFUSALS)
