"""Architectures of transformers with small sizes and random weights: forward and gradient under `jit` against torch.

- `table.py`: the rows of all files below, and the class of a row.
- `decoders.py`, `experts.py`, `state_space.py`, `encoders.py`, `encoder_decoders.py`, `vision.py`, `audio.py`,
  `multimodal.py`, `time_series.py`: the rows of one kind of model.
- `comparison.py`: one row, compared with torch.
- `worker.py`, `__main__.py`: all rows, in child processes; `page.py`: the page of the docs.
"""
