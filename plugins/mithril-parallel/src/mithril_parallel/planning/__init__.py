"""Estimates of the memory and time of a program on any target, before a compiler has run."""
