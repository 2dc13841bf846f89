"""Kernels whose loops TVM schedules."""
