"""The standard optimization passes of mithril."""
