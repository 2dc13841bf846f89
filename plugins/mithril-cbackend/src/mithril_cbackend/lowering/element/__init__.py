"""Element-wise kernels and the readers that fuse expressions into other kernels."""
