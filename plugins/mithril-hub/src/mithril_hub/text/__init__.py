"""Text as tokens: tokenizers of checkpoints and chat templates."""
