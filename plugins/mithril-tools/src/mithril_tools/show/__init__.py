"""Observers of a compilation that print or write files."""
