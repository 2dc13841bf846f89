"""Frameworks whose threads do not survive a fork: an error in the child in place of a call that never returns."""

from __future__ import annotations

import os
from weakref import WeakSet

from mithril.base import BackendError

_STARTED: dict[str, int] = {}  # framework -> the process in which it started
_MODELS: WeakSet[object] = WeakSet()  # those that have fast paths, which look at nothing


def started(framework: str) -> None:
    """Note that the framework runs in this process; raise if it runs in the process that this one was forked from."""
    parent = _STARTED.setdefault(framework, os.getpid())
    if parent != os.getpid():
        raise BackendError(
            f"this process was forked from process {parent}, in which {framework} had started",
            facts=["a fork copies no threads: calls would wait for them for ever"],
            hint="multiprocessing.get_context('spawn') starts processes of their own;"
            " or fork before the first model is compiled",
        )


def watch(model: object) -> None:
    """Let ``model.forked()`` be called in child processes, so that it forgets its fast paths."""
    _MODELS.add(model)


def _in_child() -> None:
    for model in list(_MODELS):
        model.forked()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
