"""Text generation: sampling, prompts of different lengths, beams, speculation."""
