"""Transformations of graphs that give graphs: rows of a batch, and derivatives of every order."""
