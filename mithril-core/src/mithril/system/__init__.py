"""The machine below a program: files and caches on disk, fingerprints as their keys, timing, launchers."""

from mithril.base.lazy_exports import lazy_exports

HOMES = {
    "": ("files", "notebook"),
    "archives": ("check_archive",),
    "array_cache": ("ArrayCache",),
    "cpu_stopwatch": ("Lap", "Stopwatch", "lower_quartile"),
    "disk_cache": ("Store",),
    "fingerprints": ("UnhashableObject", "fields", "fingerprint", "package_content", "package_version_key"),
    "interleaved_timing": ("time_interleaved",),
    "launchers": ("LaunchedTask", "launched_task", "shared_attempt"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
