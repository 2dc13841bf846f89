"""The predecessor's language of models."""
