"""GGUF files: reading and writing, matrices in their formats of blocks, and vocabularies."""
