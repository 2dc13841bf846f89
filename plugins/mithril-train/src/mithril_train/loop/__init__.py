"""The training loop: Trainer, callbacks, history, and checkpoints."""
