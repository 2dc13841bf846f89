"""The hardware that mithril compiles for: processors, telephones, GPUs and TPUs, and which of it a machine has."""
