"""TensorFlow Lite models: import as models for every backend, without TensorFlow."""
