"""Graphs cut for many devices: the part that one device runs, and what devices tell each other."""
