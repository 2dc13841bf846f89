"""Plugin of mithril-keras; importing this module does not import h5py."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import Export, FileFormat, hookimpl


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """Return ``ml.from_keras``."""
    return [Export("from_keras", "mithril_keras.model:from_keras")]


@hookimpl
def mithril_formats() -> Sequence[FileFormat]:
    """Return the format of ``ml.load("model.keras")``."""
    loads, models = "mithril_keras.model:load", "mithril_keras.model:from_keras"
    return [FileFormat("keras", (".keras",), loads=loads, models=models, summary="Keras 3 archives")]
