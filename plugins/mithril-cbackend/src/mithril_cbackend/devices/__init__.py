"""Devices other than the CPU: kernels as launches, and programs that a host runs on one."""
