"""Ahead-of-time compilation for hardware that this machine need not have."""
