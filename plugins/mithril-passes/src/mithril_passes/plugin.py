"""What mithril-passes adds to mithril; importing this module imports no framework."""
