"""Graph to kernels: fusion, int8 weights, plugin kernels, and the layout of a call's arguments."""
