"""A model of XLA, the compiler of TPUs and GPUs: what it fuses, stores in tiles and copies."""
