"""The types and helpers that every other folder uses.

- Types: `array_types.py`, `functions.py` (torch functions, and the record of a trace), `traits.py` (facts that a trace
  shows), `module_locks.py`, `dtypes.py`, `static.py` (arguments that are not arrays),
  `signature.py` (arrays and static arguments of a call), `partials.py` (arguments that a `functools.partial` fixes),
  `output_shapes.py` (types of results that a user declares).
- Arrays: `pytree.py`, `convert.py` (arrays to tensors and back), `host_memory.py` (tensors over XLA's host buffers),
  `gpu_memory.py` (values between torch and XLA on a GPU), `loans.py` (copies before torch writes to an array).
- JAX arrays in a program: `materialized.py` (arrays that XLA computes once), `extreme_positions.py` (positions of the
  largest and smallest elements), `cpu_identity.py` (primitives that tell XLA's CPU compiler something).
- Runs of a torch function: `runner.py`, `nested_calls.py` (calls inside a run or a callback), `torch_state.py` (torch's
  settings), `random_numbers.py`, `writes.py` (arguments that an operator writes to), `overlap.py` (writes that depend
  on the order of elements), `forward_mode.py` (a lock of torch's forward mode), `inner_autograd.py` (calls of autograd
  inside a function), `leaf_arguments.py` (arguments with a ``.grad``), `jax_calls.py` (JAX functions that torch code
  calls), `debug.py` (JAX's debugging switches).
- The process: `fork.py` (forked processes), `process_end.py` (callbacks that run when the process ends),
  `imports.py` (imports that Ctrl-C does not interrupt), `profilers.py`, `pickling.py`, `library_files.py` (which
  source files are the user's), `cache_folder.py` (the folder of jtbridge's files).
- `tuning.py`: choices that are measured on the user's machine, and the files that keep them.
- Graphs: `node_arguments.py` (arguments of nodes), `transposed.py` (transposed matrices).
- Derivatives: `primitive_rules.py` (helpers for the rules of primitives), `second_gradients.py`, `recurrent_cells.py`.
- Messages: `messages.py`, `gpu_errors.py`. Small helpers: `positions.py`, `containers.py`, `context_variables.py`,
  `definitions.py`.
"""
