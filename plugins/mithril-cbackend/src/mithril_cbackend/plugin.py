"""What mithril-cbackend adds to mithril; importing this module imports no framework."""
