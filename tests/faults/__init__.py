"""Everything that goes wrong around a call: the error is clear, nothing is lost, nothing hangs, the next call works."""
