"""Crossings: random rows of features that are used together, each checked against a plain reference."""

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")  # for the rows on meshes; JAX reads it when it is imported
