"""``mithril migrate``: programs of the predecessor in today's spelling."""
