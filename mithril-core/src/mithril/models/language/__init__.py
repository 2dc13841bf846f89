"""The model language: layers, models, connections, control flow, and tracing to a graph."""
