"""The translating backend, and what is said and saved of its programs."""
