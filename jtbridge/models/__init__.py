"""Torch modules as functions of their parameters and state.

- `_layout.py`: the tensors of a module, and their names.
- `_copying.py`: copies of a module's Python objects, with other tensors in them.
- `_own_tensors.py`: the error for a call that uses the torch module's own tensors.
- `_python_state.py`: changes of numbers, strings and flags in attributes.
- `_run.py`: one call of a copy, and the state that it changed.
- `_module.py`: :func:`jtbridge.module` and its result.
- `_state_dict.py`, `_safetensors.py`: torch's ``state_dict``, and files.
- `_sharding.py`, `_sharding_presets.py`: the sharding functions such as :func:`jtbridge.shard`, and the axes that
  presets split.
- `_optimizer_states.py`: the names and shardings of an optimizer's state.
- `_release.py`: releases the weights of the torch module, and writes them back.
- `_caches.py`: the caches of transformers as pytrees.
- `_programs.py`: a cache of compiled programs, cleared when the module's Python state changes.
- `generation/`: :func:`jtbridge.generate`.
- `training/`: training steps.

A call never runs the user's module: it runs a copy of its Python objects, made for this call, that holds the tensors
of the call. So no other thread sees the call, train and eval mode are chosen per call, and whatever the call assigns to
an attribute is read from the copy afterwards.
"""

from ._module import JaxModule, module
from ._sharding import shard, shard_batch, shardings
from .generation import generate
from .training import TrainState, TrainStep, train_step
