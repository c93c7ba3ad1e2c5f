"""The types and helpers that every other folder uses.

- Types: `array_types.py`, `functions.py` (torch functions, and the record of a trace), `traits.py` (facts that a trace
  shows), `module_locks.py`, `dtypes.py`, `static.py` (arguments that are not arrays),
  `signature.py` (arrays and static arguments of a call), `declared.py` (declared types of results).
- Arrays: `pytree.py`, `convert.py` (arrays to tensors and back), `host_memory.py` (tensors over XLA's host buffers).
- Runs of a torch function: `run.py`, `nesting.py`, `torch_state.py` (torch's settings), `random_numbers.py`,
  `writes.py` (arguments that an operator writes to), `debug.py` (JAX's debugging switches), `pickling.py`,
  `imports.py` (slow imports),
  `fork.py` (forked processes).
- `rules.py`: helpers for the rules of primitives.
"""
