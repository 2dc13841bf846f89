"""Static quantization: ranges of activations from samples, and the pass that inserts quantize and dequantize."""
