"""Lowerings, one file per family: torch's values, shapes and dtypes where its semantics are its own."""
