"""Names of types in error messages."""

from __future__ import annotations

from typing import Any

import jax
import jax.core


def kind_of(value: Any) -> str:
    """Return the type of a value with its article, such as "an int" or "a jax.Array"."""
    if isinstance(value, jax.core.Tracer):
        return "a JAX tracer"
    if isinstance(value, jax.Array):
        return "a jax.Array"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
