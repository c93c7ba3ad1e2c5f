"""How the kernel is launched, by shape: heads and tokens of a program, and its warps."""

from __future__ import annotations

import dataclasses

from jtbridge.kernels._shapes import next_power_of_2

# Elements of a half that a program takes for one head, 8 for each of its threads, and how many heads.
_BLOCK, _HEADS = 1024, 4
# Warps where nothing was tuned, and in what tuning tries; there the elements of a half that a thread takes for one head
# are not fewer.
_WARPS, _MOST_WARPS, _LEAST = 4, 8, 4


@dataclasses.dataclass(frozen=True)
class RopeConfiguration:
    """Heads and tokens that a program takes, and its warps."""

    head_block: int
    token_block: int
    warps: int


def default(heads: int, tokens: int, half: int, interleaved: bool) -> RopeConfiguration:
    """What is taken where nothing was tuned, of the most heads of an array."""
    half_block = next_power_of_2(half)
    token_block = min(next_power_of_2(tokens), max(1, _BLOCK // half_block))
    return RopeConfiguration(
        min(next_power_of_2(heads), _held(interleaved)),
        token_block,
        min(_WARPS, max(1, token_block * half_block // 256)),
    )


def candidates(heads: int, tokens: int, half: int, interleaved: bool) -> list[RopeConfiguration]:
    """What tuning tries, the default first.

    Less for a thread, by heads or by warps; half of the tokens, or twice as many, with the warps; and twice the heads,
    by the warps, or of half of the tokens. None has more for a thread than the default.
    """
    taken = default(heads, tokens, half, interleaved)
    h, t, w = dataclasses.astuple(taken)
    others = (
        (h // 2, t, w),
        (h, t, 2 * w),
        (h, t // 2, w // 2),
        (h, 2 * t, 2 * w),
        (2 * h, t, 2 * w),
        (2 * h, t // 2, w),
    )

    def fits(c: RopeConfiguration) -> bool:
        elements = c.token_block * next_power_of_2(half)
        return (
            0 < c.head_block <= next_power_of_2(heads)
            and 0 < c.token_block <= next_power_of_2(tokens)
            and 0 < c.warps <= _MOST_WARPS
            and elements >= _LEAST * 32 * c.warps
        )

    return list(dict.fromkeys([taken, *filter(fits, (RopeConfiguration(*each) for each in others))]))


def _held(interleaved: bool) -> int:
    """How many heads: neighbours are told apart in registers, which then hold fewer."""
    return _HEADS // 2 if interleaved else _HEADS
