"""Random torch programs, compared with torch on every backend. Run with ``python -m tests.fuzz``."""
