# Frozen with mithril 0.1: never edit this file. Later versions must run it unchanged.
"""Tools: a target, a profiler, a command, a file format, a frontend, observers and deciders."""
