"""Crossings: random rows of features that are used together, each checked against a plain reference."""
