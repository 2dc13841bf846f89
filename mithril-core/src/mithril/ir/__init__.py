"""The graph every plugin sees: values, nodes, graphs; building, editing, printing, parsing, verifying."""

from mithril.base.registry import operation, operations
from mithril.ir.apply import emit
from mithril.ir.attribute_text import attribute_text, attributes_key
from mithril.ir.body_axes import body_axes
from mithril.ir.builder import Builder, trace
from mithril.ir.core import NOWHERE, Graph, Input, Node, Op, Origin, Output, Value, as_results, iterate
from mithril.ir.editor import Editor
from mithril.ir.parse import parse
from mithril.ir.result_names import cotangent_name, result, result_name
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
    "Output",
    "Value",
    "as_results",
    "attribute_text",
    "attributes_key",
    "body_axes",
    "cotangent_name",
    "emit",
    "iterate",
    "operation",
    "operations",
    "parse",
    "result",
    "result_name",
    "same",
    "structural_hash",
    "to_text",
    "trace",
    "verify",
]
