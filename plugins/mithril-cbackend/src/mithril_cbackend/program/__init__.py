"""Programs: compiling kernels, loading machine code, and calling it."""
