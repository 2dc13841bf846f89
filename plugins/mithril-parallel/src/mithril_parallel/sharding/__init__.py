"""SPMD partitioning: per-device graphs with their collectives, pipeline stages and sharded checkpoints."""
