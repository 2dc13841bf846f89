"""Plugin of mithril-backend-example; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import BackendSpec, hookimpl


@hookimpl
def mithril_backends() -> Sequence[BackendSpec]:
    """Return the backend named 'stepper'."""
    return [
        BackendSpec(
            name="stepper",
            class_name="StepperBackend",
            loads="mithril_backend_example.backend:StepperBackend",
            requires=("numpy",),
            summary="one operation at a time on NumPy, for watching",
        )
    ]
