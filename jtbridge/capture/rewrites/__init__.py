"""Replacements of functions of torch whose own graphs are long, wrong or impossible, applied by `modes/overrides.py`.

Each file replaces one group of functions: its `REPLACEMENTS` maps functions of torch to their replacements.
"""

from . import ctc, indexing, one_hot, packed, recurrent, truth

REPLACEMENTS = {
    **recurrent.REPLACEMENTS,
    **packed.REPLACEMENTS,
    **indexing.REPLACEMENTS,
    **one_hot.REPLACEMENTS,
    **ctc.REPLACEMENTS,
    **truth.REPLACEMENTS,
}
