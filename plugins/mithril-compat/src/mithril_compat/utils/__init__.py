"""The names of the predecessor's ``mithril.utils``."""
