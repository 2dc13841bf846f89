"""One model on many devices: where tensors are placed, graphs cut for each device, and plans of time and memory."""
