"""Decoders in GGUF files, in the layout that llama.cpp reads."""
