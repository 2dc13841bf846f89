"""Hardware targets: CPUs, mobile devices, GPUs and TPUs, and their detection."""
