"""Dispatch modes and function modes that are active while a function is traced."""
