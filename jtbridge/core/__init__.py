"""The types and helpers that every other folder uses.

- Types: `array_types.py`, `functions.py` (torch functions, and the record of a trace), `traits.py` (facts that a trace
  shows), `module_locks.py`, `dtypes.py`, `static.py` (arguments that are not arrays),
  `signature.py` (arrays and static arguments of a call), `partials.py` (those of a `functools.partial`),
  `output_shapes.py` (types of results that a user declares).
- Arrays: `pytree.py`, `convert.py` (arrays to tensors and back), `host_memory.py` (tensors over XLA's host buffers).
- Arrays of JAX in a program: `materialized.py` (computed once), `extreme_positions.py` (of the largest element),
  `cpu_identity.py` (primitives that tell XLA's CPU compiler something).
- Runs of a torch function: `runner.py`, `nested_calls.py` (calls inside a run or a callback), `torch_state.py` (torch's
  settings), `random_numbers.py`, `writes.py` (arguments that an operator writes to), `overlap.py` (writes that depend
  on the order of elements), `forward_mode.py` (one thread at a time in it), `debug.py` (JAX's debugging switches).
- The process: `fork.py` (forked processes), `imports.py` (imports that Ctrl-C does not break off), `pickling.py`,
  `library_files.py` (which source files are the user's), `cache_folder.py` (the folder of jtbridge's files).
- `tuning.py`: choices that are measured on the user's machine, and the files that keep them.
- `node_arguments.py`: arguments of the nodes of a graph. `primitive_rules.py`: helpers for the rules of primitives.
  `messages.py`: messages to the user.
"""
