"""What holds for any function, tree, shape and dtype, tried on random ones by Hypothesis."""
