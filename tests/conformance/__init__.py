"""Conformance: PyTorch's own operator database, every operator, run through JAX and compared with torch.

``python -m tests.conformance --help`` says how to run it. One case is one sample of one operator in one mode:

* ``forward``: the operator under ``jax.jit``;
* ``grad``: reverse mode, a random cotangent pulled back to every float or complex input;
* ``vmap``: two rows under ``jax.vmap``;
* ``jvp``: forward mode along a random tangent;
* ``gradgrad``: reverse mode of reverse mode.

References are torch's, computed by plain torch in the same process. Where torch itself has no answer the case is
"not applicable": it is counted and listed with torch's reason, and stays out of the percentages.
"""
