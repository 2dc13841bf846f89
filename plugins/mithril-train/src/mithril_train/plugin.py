"""What mithril-train adds to mithril; importing this module imports no framework."""
