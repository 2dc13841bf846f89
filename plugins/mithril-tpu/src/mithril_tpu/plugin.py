"""What mithril-tpu adds to mithril; importing this module imports no framework."""
