"""Torch functions that launch Triton kernels."""
