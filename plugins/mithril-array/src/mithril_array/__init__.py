"""The Python array API standard, eagerly, on every backend of mithril."""
