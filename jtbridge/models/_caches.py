"""The caches of transformers as pytrees."""

from __future__ import annotations

import sys

from jtbridge.core.pytree import register_class


def register_caches() -> None:
    """Register the cache classes with JAX, if the user has imported transformers.

    A cache that a user makes and passes into ``jax.jit`` must be a pytree before the first call.
    """
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None:
        return
    bases = tuple(
        cls
        for name in ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")
        if isinstance(cls := getattr(caches, name, None), type)
    )
    for cls in list(vars(caches).values()):
        if isinstance(cls, type) and issubclass(cls, bases):
            register_class(cls)
