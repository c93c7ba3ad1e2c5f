"""Indexing, gathers and scatters."""
