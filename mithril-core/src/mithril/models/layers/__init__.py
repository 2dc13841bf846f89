"""The layer library, one file per family."""
