"""The parameters of a pretrained model, before it has weights."""

from __future__ import annotations

from mithril.base import TensorType
from mithril.compiler import TraceRequest, source_of
from mithril_hub.model import Pretrained


def parameter_types(model: Pretrained) -> dict[str, TensorType]:
    """Return the parameters of a model by name, from a trace with the sizes of an example."""
    source = source_of(model, outputs=None, inference=True)
    graph = source.graph(model.example_types(), TraceRequest())
    return {i.name: i.type for i in graph.with_role("param")}
