"""Properties of any function, tree, shape and dtype, tried on random ones by Hypothesis."""
