"""The model language and the layer library."""

from __future__ import annotations

from mithril.models.connection import Connection, IOKey
from mithril.models.layer import Layer
from mithril.models.model import Model

__all__ = ["Connection", "IOKey", "Layer", "Model"]
