"""Export of compiled models as ONNX files."""
