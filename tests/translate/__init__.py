"""The translating backend: its programs, their reports, and their export."""
