"""The graph every plugin sees: values, nodes, graphs; building, editing, printing, parsing, verifying."""

from mithril.base.registry import operation, operations
from mithril.ir.apply import emit
from mithril.ir.attribute_text import attribute_text, attributes_key
from mithril.ir.body_axes import body_axes
from mithril.ir.builder import Builder, trace
from mithril.ir.core import NOWHERE, Graph, Input, Node, Op, Origin, Value, iterate
from mithril.ir.editor import Editor
from mithril.ir.parse import parse
from mithril.ir.text import same, structural_hash, to_text
from mithril.ir.verify import verify

__all__ = [
    "NOWHERE",
    "Builder",
    "Editor",
    "Graph",
    "Input",
    "Node",
    "Op",
    "Origin",
    "Value",
    "attribute_text",
    "attributes_key",
    "body_axes",
    "emit",
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
