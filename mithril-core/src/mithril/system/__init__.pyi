"""The machine below a program: files and caches on disk, fingerprints as their keys, timing, launchers."""

from mithril.system import (
    files as files,
    notebook as notebook,
)
from mithril.system.disk_cache import (
    ArrayCache as ArrayCache,
    Store as Store,
)
from mithril.system.files import check_archive as check_archive
from mithril.system.fingerprints import (
    UnhashableObject as UnhashableObject,
    fields as fields,
    fingerprint as fingerprint,
    package_content as package_content,
    package_version_key as package_version_key,
)
from mithril.system.launchers import (
    LaunchedTask as LaunchedTask,
    launched_task as launched_task,
    shared_attempt as shared_attempt,
)
from mithril.system.timing import (
    Lap as Lap,
    Stopwatch as Stopwatch,
    lower_quartile as lower_quartile,
    time_interleaved as time_interleaved,
)
