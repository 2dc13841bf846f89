"""Programs: building a ggml graph, planning its arena, and calling it."""
