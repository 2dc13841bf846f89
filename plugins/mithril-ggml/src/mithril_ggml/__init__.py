"""The GGML backend of mithril: quantized deployment and GGUF files that carry their graph."""
