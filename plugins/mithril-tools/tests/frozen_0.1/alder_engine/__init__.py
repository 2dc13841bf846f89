# Frozen with mithril 0.1: never edit this file. Later versions must run it unchanged.
"""A backend: NumPy, with a record of the calls."""
