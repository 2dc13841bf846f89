"""The WebGPU backend of mithril."""
