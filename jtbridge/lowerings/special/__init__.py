"""Special functions and orthogonal polynomials."""
