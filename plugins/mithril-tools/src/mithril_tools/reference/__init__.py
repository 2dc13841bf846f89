"""Reference pages, written from the declarations: ``mithril docs NAME`` prints them, the site shows the same text."""

from mithril_tools.reference.catalog import KINDS, find, pages
from mithril_tools.reference.page import Page

__all__ = ["KINDS", "Page", "find", "pages"]
