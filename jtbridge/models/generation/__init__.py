"""Text generation by models of transformers: one program with the prompt, and a loop over the tokens.

- `_generate.py`: :func:`jtbridge.generate`: its arguments, and the program that is kept for later calls.
- `_settings.py`: the settings from a model's ``generation_config`` and the arguments.
- `_decoder.py`: the model as two functions: one reads the prompt, the other reads one more token.
- `_cache.py`: the model's cache at a fixed size, as the carry of a loop.
- `_scores.py`: changes of the scores of the next token: penalties, forced and suppressed tokens, top-k and top-p.
- `_sample.py`, `_beams.py`: the loops: greedy and sampled tokens, and beam search.
- `_stream.py`: tokens passed to a Python function as they are generated.
"""

from ._generate import generate

__all__ = ["generate"]
