"""The ggml library: loading it, its types, and errors in place of aborts."""
