"""Tests of jtbridge. References are PyTorch's own answers, never jtbridge's."""
