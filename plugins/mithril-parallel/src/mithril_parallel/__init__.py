"""One model on many devices: sharding strategies, per-device graphs, pipelines, and estimates of time and memory."""
