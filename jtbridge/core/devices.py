"""JAX's default device. The option `jax_default_device` is a device, the name of a platform, or None."""

from __future__ import annotations

from typing import Any

import jax


def default_device() -> Any:
    """Return the device on which JAX puts new arrays."""
    option: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if option is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=option)[0] if isinstance(option, str) else option


def default_platform() -> str:
    """Return the platform of JAX's default device, such as "cpu"."""
    option: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    return getattr(option, "platform", option) or jax.default_backend()
