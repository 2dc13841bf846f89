"""Lowering from graph operations to loops: scalar ops, index expressions, and a template per kernel family."""
