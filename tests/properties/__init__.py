"""Properties of all functions, trees, shapes and dtypes, tested on random examples by Hypothesis."""
