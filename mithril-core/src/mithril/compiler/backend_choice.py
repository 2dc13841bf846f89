"""Resolution of the ``backend`` argument: an instance, a class or a name."""

from __future__ import annotations

from mithril import plugins
from mithril.backend import Backend
from mithril.base import BackendError, OptionError
from mithril.compiler.option_table import Settings


def backend_names(backend: Backend, settings: Settings) -> set[str]:
    """Return the names of a backend and of those in ``backend_map``, with the names of their base classes."""
    guests = [plugins.backend_class(g) if isinstance(g, str) else g for g in settings.as_dict()["backend_map"].values()]
    return {name for one in (backend, *guests) for name in one.names()}


def make_backend(backend: Backend | type[Backend] | str, settings: Settings) -> Backend:
    """Return the backend instance for an instance, a class or a name."""
    if isinstance(backend, str):
        backend = plugins.backend_class(backend)
    if isinstance(backend, type) and issubclass(backend, Backend):
        precision = settings["precision"]
        return backend(precision=precision) if precision else backend()
    if isinstance(backend, Backend):
        precision = settings["precision"]
        if precision and backend.precision not in (None, precision):
            raise OptionError(
                f"precision='{precision}' conflicts with the backend's precision '{backend.precision}'",
                hint="pass precision only once",
            )
        return backend.with_precision(precision) if precision and backend.precision is None else backend
    raise BackendError(
        f"expected a backend instance, class or name, got {backend!r}",
        facts=["accepted: a backend instance such as ml.NumpyBackend(), its class, or its name"],
    )
