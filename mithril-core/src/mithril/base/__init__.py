"""Shared vocabulary: errors, decisions, dtypes, symbolic sizes, registry, files on disk, timing."""
