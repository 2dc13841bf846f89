"""Fork safety: raise in a child process instead of blocking forever on threads that did not survive the fork."""

from __future__ import annotations

import os
from weakref import WeakSet

from mithril.graph import BackendError

_STARTED: dict[str, int] = {}  # framework -> id of the process in which it started
_MODELS: WeakSet[object] = WeakSet()  # models with fast paths, which do not check for a fork


def require_unforked(framework: str) -> None:
    """Record that the framework runs in this process; raise if it started in the parent of a fork."""
    parent = _STARTED.setdefault(framework, os.getpid())
    if parent != os.getpid():
        raise BackendError(
            f"this process was forked from process {parent}, in which {framework} had started",
            facts=["a fork copies no threads, so calls would wait for them forever"],
            hint="start processes with multiprocessing.get_context('spawn'),"
            " or fork before the first model is compiled",
        )


def watch(model: object) -> None:
    """Call ``model.forked()`` in child processes, so that the model discards its fast paths."""
    _MODELS.add(model)


def _in_child() -> None:
    for model in list(_MODELS):
        model.forked()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
