"""The predecessor's layers, as functions of values."""
