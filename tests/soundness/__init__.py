"""Cases that a bridge between torch and JAX easily gets wrong. ``python -m tests.soundness`` counts them."""
