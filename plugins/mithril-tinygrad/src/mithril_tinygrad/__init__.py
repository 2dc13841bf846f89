"""The tinygrad backend of mithril: programs are kernels of tinygrad, captured by its TinyJit."""
