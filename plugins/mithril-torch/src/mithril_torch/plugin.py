"""What mithril-torch adds to mithril; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import BackendSpec, hookimpl


@hookimpl
def mithril_backends() -> Sequence[BackendSpec]:
    """The torch backend."""
    return [
        BackendSpec(
            name="torch",
            class_name="TorchBackend",
            loads="mithril_torch.backend:TorchBackend",
            requires=("torch",),
            summary="generated PyTorch source, eager or torch.compile",
        )
    ]
