"""Launch configurations of the rotary embedding kernel by shape: heads and tokens of a program, and its warps."""

from __future__ import annotations

import dataclasses

from jtbridge.kernels._shapes import next_power_of_2

# In the default configuration, a program takes this many elements of one half of a head (8 for each thread), and this
# many heads.
_BLOCK, _HEADS = 1024, 4
# The most warps of the default configuration, the most warps of a candidate of tuning, and the fewest elements of one
# half of a head that a thread of a candidate takes.
_WARPS, _MAX_WARPS, _MIN_PER_THREAD = 4, 8, 4


@dataclasses.dataclass(frozen=True)
class RopeConfiguration:
    """The heads and tokens that a program takes, and its warps."""

    head_block: int
    token_block: int
    warps: int


def default(heads: int, tokens: int, half: int, interleaved: bool) -> RopeConfiguration:
    """Return the default configuration; `heads` is the larger of the two arrays' numbers of heads."""
    half_block = next_power_of_2(half)
    token_block = min(next_power_of_2(tokens), max(1, _BLOCK // half_block))
    return RopeConfiguration(
        min(next_power_of_2(heads), _held(interleaved)),
        token_block,
        min(_WARPS, max(1, token_block * half_block // 256)),
    )


def candidates(heads: int, tokens: int, half: int, interleaved: bool) -> list[RopeConfiguration]:
    """Return the configurations that tuning tries, the default first.

    They have half the heads; twice the warps; half or twice the tokens and warps; or twice the heads, with twice the
    warps or half the tokens. None has more elements for a thread than the default.
    """
    first = default(heads, tokens, half, interleaved)
    h, t, w = dataclasses.astuple(first)
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
            and 0 < c.warps <= _MAX_WARPS
            and elements >= _MIN_PER_THREAD * 32 * c.warps
        )

    return list(dict.fromkeys([first, *filter(fits, (RopeConfiguration(*each) for each in others))]))


def _held(interleaved: bool) -> int:
    """Return the default number of heads of a program: fewer if neighbours are rotated, which takes more registers."""
    return _HEADS // 2 if interleaved else _HEADS
