"""Cases in which a bridge between torch and JAX is easily wrong. ``python -m tests.soundness`` counts them."""
