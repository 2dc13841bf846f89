"""Element-wise kernels, and the element reader that fuses expressions into other kernels."""
