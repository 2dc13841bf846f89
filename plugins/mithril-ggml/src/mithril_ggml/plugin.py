"""What mithril-ggml adds to mithril; importing this module imports no framework."""
