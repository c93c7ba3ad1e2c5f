"""Lowerings, one file per family: values, shapes and dtypes where torch's semantics differ from JAX's."""
