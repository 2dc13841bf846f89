"""Specialization: rewrite operations to the variants that are always faster on the backend, without measurements."""

from __future__ import annotations

from mithril import Graph, pass_
from mithril.graph import Editor
from mithril.passes import PassContext
from mithril_passes.operation_forms.op_variants import variants_of


@pass_(name="specialize-operations", exact=False)
def specialize_operations(graph: Graph, context: PassContext) -> Graph:
    """Rewrite one-row products, one-pixel and depthwise convolutions to the variant that the backend prefers."""
    if context.backend is None or not targets_own_device(context):
        return graph
    preferred = context.backend.capabilities.prefers
    editor: Editor | None = None
    for node in graph.nodes:
        if node.op not in preferred or node.tags.get("backend") is not None:
            continue
        variant = next((w for w in variants_of(node) if w.name in preferred[node.op]), None)
        if variant is not None:
            editor = editor or graph.edit()
            current = editor.producer(node.result) or node  # with replaced operands
            with editor.before(current):
                editor.replace_value(node.result, variant.make(current, *current.operands))
            editor.erase_dead(current)
    return graph if editor is None else editor.freeze()


def targets_own_device(context: PassContext) -> bool:
    """Whether the program targets the backend's own device, to which preferences and measurements apply."""
    return context.target is None or context.target.family == context.backend.capabilities.family
