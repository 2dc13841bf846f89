"""A model of XLA, the compiler of TPUs and GPUs: its fusions, tiled layouts and layout copies."""
