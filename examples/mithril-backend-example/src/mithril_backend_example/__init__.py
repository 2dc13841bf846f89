"""A third party's backend for mithril: runs a graph one operation at a time, and lets you watch."""
