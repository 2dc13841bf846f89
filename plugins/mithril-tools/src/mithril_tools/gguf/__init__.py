"""GGUF files: reading, and matrices in their formats of blocks."""
