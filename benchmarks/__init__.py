"""The time and memory of jtbridge, of the other ways to call torch from JAX, and of torch itself.

`make bench`, or `python -m benchmarks [--quick] [--only NAME ...] [--clock cpu] [--list]`, prints one table and writes
the same as JSON under build/bench. Nothing is asserted, because machines differ: a person reads the table.
"""
