"""GGUF files: reading, writing, and models that carry their graph."""
