"""The NumPy backend of mithril: generated, readable NumPy code that defines what every operation means."""
