"""Reports on a function: `explain`, `check` and `purity`."""
