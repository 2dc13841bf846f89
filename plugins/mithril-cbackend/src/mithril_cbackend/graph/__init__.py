"""From a graph to kernels: fusion, buffers, the arena, and the arguments of a call."""
