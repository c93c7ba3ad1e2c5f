"""Replacements of functions of torch whose own graphs are long, wrong or impossible, applied by `modes/overrides.py`.

A file holds the replacements of one group of functions, as `REPLACEMENTS`: torch's function to its replacement.
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
