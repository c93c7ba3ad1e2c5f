"""Calls of wrapped functions: `eager` runs torch itself, `traced` binds a primitive of a traced program."""
