"""Export of a model as a directory of C source."""
