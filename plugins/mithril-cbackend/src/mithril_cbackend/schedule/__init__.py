"""Schedules: files of them, short measurements at compile time, and the offline search."""
