"""Commands of mithril-hub."""
