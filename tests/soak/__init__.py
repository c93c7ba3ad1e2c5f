"""Many threads call wrapped functions of all kinds for minutes. Run with ``python -m tests.soak``."""
