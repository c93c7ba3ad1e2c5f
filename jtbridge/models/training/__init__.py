"""Training steps of modules, with an optimizer of optax.

- `_bound_model.py`: the module with its parameters and state, as a loss calls it.
- `_microbatches.py`: the parts of a batch, for the accumulation of gradients.
- `_train_step.py`: :func:`jtbridge.train_step` and its result.
"""

from ._train_step import TrainState, TrainStep, train_step
