"""Lowerings of jtbridge's own operators."""
