# Frozen with mithril 0.1: never edit this file. Later versions must run it unchanged.
"""Operations, their lowerings, and passes."""
