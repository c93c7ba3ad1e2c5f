"""Reductions, scans, sorts and histograms."""
