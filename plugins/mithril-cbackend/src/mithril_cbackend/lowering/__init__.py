"""Lowering of graph operations to loops: element expressions, and a template per family of kernels."""
