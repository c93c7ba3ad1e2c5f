"""The version of jtbridge, which `pyproject.toml` reads too."""

__version__ = "0.1.0"
