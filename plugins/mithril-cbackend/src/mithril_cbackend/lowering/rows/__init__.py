"""Reductions, scans, and fused kernels over rows."""
