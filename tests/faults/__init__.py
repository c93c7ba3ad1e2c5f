"""Faults around a call: the error is clear, nothing is lost, nothing hangs, and the next call works."""
