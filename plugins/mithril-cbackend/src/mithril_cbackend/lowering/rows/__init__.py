"""Reductions, scans, and kernels that keep a row in registers."""
