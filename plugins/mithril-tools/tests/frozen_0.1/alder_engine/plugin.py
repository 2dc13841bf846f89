# Frozen with mithril 0.1: never edit this file. Later versions must run it unchanged.
"""Hooks of alder-engine."""

from mithril import BackendSpec, DeviceSpec, hookimpl

api_version = 1


@hookimpl
def mithril_backends():
    return [
        BackendSpec(
            "alder", "AlderBackend", "alder_engine.backend:AlderBackend", requires=("numpy",), summary="NumPy, traced"
        )
    ]


@hookimpl
def mithril_devices():
    return [DeviceSpec("alder-board", "alder_engine.backend:BoardBackend", family="cpu", summary="a board")]
