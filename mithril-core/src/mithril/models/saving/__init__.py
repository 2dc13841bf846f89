"""Models as dictionaries and JSON: the structure without the numbers; reading runs no code of the file."""

from mithril.models import language  # noqa: F401  (fills the methods of layers, also with those of this package)
