"""Operators of jtbridge's own."""
