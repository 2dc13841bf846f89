"""Shared fixtures."""

from mithril_testing.fake_site import site  # noqa: F401
