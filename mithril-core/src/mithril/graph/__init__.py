"""The graph every plugin sees: values, nodes, graphs; building, editing, printing, parsing, verifying."""

from mithril.graph.attributes import attribute_text, attributes_key
from mithril.graph.builder import Builder, trace
from mithril.graph.core import NOWHERE, Graph, Input, Node, OpLike, Origin, Value, iterate
from mithril.graph.editor import Editor
from mithril.graph.parse import parse
from mithril.graph.registry import operation, operations
from mithril.graph.text import same, structural_hash, to_text
from mithril.graph.verify import verify

__all__ = [
    "NOWHERE",
    "Builder",
    "Editor",
    "Graph",
    "Input",
    "Node",
    "OpLike",
    "Origin",
    "Value",
    "attribute_text",
    "attributes_key",
    "iterate",
    "operation",
    "operations",
    "parse",
    "same",
    "structural_hash",
    "to_text",
    "trace",
    "verify",
]
