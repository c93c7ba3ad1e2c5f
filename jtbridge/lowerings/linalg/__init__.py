"""Matrix products, decompositions, solvers and Fourier transforms."""
