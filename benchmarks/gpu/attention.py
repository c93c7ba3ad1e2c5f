"""Attention: the Triton kernels, the implementation that jtbridge chooses, torch's and JAX's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from torch.nn.functional import scaled_dot_product_attention

from jtbridge.kernels import attention

from ._arrays import in_jax, in_jax_with_gradients, in_torch, in_torch_with_gradients, normal
from ._rows import Goal, Options, Row
from ._turns import Contestant, Contestants, attempt, milliseconds

OWN, CHOSEN, SDPA, JAX_NN = "own kernel", "chosen", "torch SDPA", "jax.nn (cuDNN)"
_OTHERS = (SDPA, JAX_NN)


def row(length: int, d: int, is_causal: bool, gradient: bool, options: Options) -> Row:
    """Time attention over 4 texts and 16 heads in bfloat16. JAX's function gets its arrays in its own axis order."""
    batch, heads = (1, 2) if options.dry else (4, 16)
    tokens = options.pick(length, 16)
    shape = batch, heads, tokens, d
    arrays, ct = [normal(*shape, seed=i) for i in range(3)], [normal(*shape, seed=3)]
    moved = [x.swapaxes(1, 2) + 0 for x in (*arrays, *ct)]

    def back(result: Any) -> Any:
        return jax.tree.map(lambda x: x.swapaxes(1, 2), result)

    def of_jax(f: Callable[..., Any], xs: list[Any], cts: list[Any], view: Any = lambda y: y) -> Contestant:
        return in_jax_with_gradients(f, xs, cts, 3, view) if gradient else in_jax(f, xs, view)

    def ours(**keywords: Any) -> Contestant:
        return of_jax(functools.partial(attention, is_causal=is_causal, **keywords), arrays, ct)

    def jax_nn() -> Contestant:
        f = functools.partial(jax.nn.dot_product_attention, is_causal=is_causal, implementation="cudnn")
        return of_jax(f, moved[:3], moved[3:], back)

    def torchs() -> Contestant:
        f = functools.partial(scaled_dot_product_attention, is_causal=is_causal)
        return in_torch_with_gradients(f, arrays, ct, 3) if gradient else in_torch(f, arrays)

    contestants: Contestants = {
        OWN: attempt(lambda: ours(implementation="triton")),
        CHOSEN: attempt(ours),
        SDPA: attempt(torchs),
        JAX_NN: attempt(jax_nn),
    }
    direction = "forward+backward" if gradient else "forward"
    return Row(
        key(length, d, is_causal, gradient),
        f"attention {direction}, 4 x 16 heads of {d}, {length // 1024}k{', causal' if is_causal else ''}",
        "ms",
        milliseconds(contestants, options, judge=SDPA),
        (Goal(CHOSEN, 0.95, _OTHERS), Goal(OWN, 0.6 if gradient else 0.7, _OTHERS)),
    )


def key(length: int, d: int, is_causal: bool, gradient: bool) -> str:
    words = ["attention", f"{length // 1024}k", str(d), *["causal"] * is_causal, "gradient" if gradient else "forward"]
    return "-".join(words)


CASES = [
    (length, d, is_causal, gradient)
    for gradient in (False, True)
    for length in (2048, 8192)
    for d in (64, 128)
    for is_causal in (False, True)
]
ROWS = {key(*case): functools.partial(row, *case) for case in CASES}
