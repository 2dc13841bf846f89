"""A server of models: text generation by the OpenAI interface, other models by the Open Inference Protocol."""
