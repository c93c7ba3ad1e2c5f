"""Times of jtbridge's kernels on a GPU, beside XLA, torch and Liger-Kernel, and the targets.

`make bench-gpu`, or `python -m benchmarks.gpu [--only NAME ...] [--list] [--dry-run]`, prints a table for each family,
with a line for each contestant and its target, and writes the same as JSON under build/bench. Contestants take turns
in one process, so that their ratios come from one run. For a contestant that is missing, fails or gives a different
result, the table shows the reason instead of a time. Nothing is asserted, because machines differ: a person reads the
table.

`--dry-run` runs everything on tiny arrays, on a CPU too. Its numbers mean nothing.
"""
