"""Quantized weights: recipes, packing, and reports."""
