"""Pretrained models: checkpoints of Hugging Face and GGUF files as models for every backend."""
