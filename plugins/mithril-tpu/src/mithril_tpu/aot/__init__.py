"""Compiling ahead of time with the compiler of hardware that need not be here."""
