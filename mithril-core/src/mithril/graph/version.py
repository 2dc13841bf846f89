"""The version of all distributions of the project."""

# The version that all distributions of mithril carry.
__version__ = "0.1.0"
