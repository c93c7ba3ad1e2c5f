"""Times of jtbridge's kernels on a GPU, beside XLA, torch and Liger-Kernel, and the targets.

`make bench-gpu`, or `python -m benchmarks.gpu [--only NAME ...] [--list] [--dry-run]`, prints a table for each family,
a line for each contestant with its target beside it, and writes the same as JSON under build/bench. Contestants take
turns in one process, so that ratios are of one run. One that is missing, fails or gives another result has the reason
in the place of its time. Nothing is asserted: a table is read by a person, for machines differ.

`--dry-run` runs all of it on tiny arrays, on a CPU too. Its numbers mean nothing.
"""
