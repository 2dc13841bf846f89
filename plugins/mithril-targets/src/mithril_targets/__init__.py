"""Hardware targets: CPUs, phones, GPUs and TPUs, and their detection."""
