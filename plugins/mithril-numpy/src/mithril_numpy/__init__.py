"""The NumPy backend of mithril: generated, readable NumPy code, the reference for other backends."""
