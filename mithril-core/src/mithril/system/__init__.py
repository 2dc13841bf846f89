"""The machine below a program: files and caches on disk, fingerprints as their keys, timing, launchers."""

from mithril.graph.lazy_exports import lazy_exports

HOMES = {
    "": ("files", "notebook"),
    "disk_cache": ("ArrayCache", "Store"),
    "files": ("check_archive",),
    "fingerprints": ("UnhashableObject", "fields", "fingerprint", "package_content", "package_version_key"),
    "launchers": ("LaunchedTask", "launched_task", "shared_attempt"),
    "measured": ("read_measured", "save_measured", "this_machine"),
    "timing": ("Lap", "Stopwatch", "Times", "lower_quartile", "time_calls", "time_interleaved"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
