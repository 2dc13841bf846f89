"""Running: backends, the compiled model, memory plan, profile, benchmark."""
