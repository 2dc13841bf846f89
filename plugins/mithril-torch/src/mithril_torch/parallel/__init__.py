"""Programs over several processes."""
