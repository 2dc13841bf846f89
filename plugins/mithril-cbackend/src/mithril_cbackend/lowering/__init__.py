"""From graph operations to loops: scalars, places, and a template per family of kernels."""
