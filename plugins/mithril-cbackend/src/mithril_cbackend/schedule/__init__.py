"""Schedules: templates, their parameters, and the search for good ones."""
