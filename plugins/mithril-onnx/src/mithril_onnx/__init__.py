"""ONNX models: import as trainable models for every backend, export of compiled models."""
