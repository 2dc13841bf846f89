"""Expressions for operations without a table row: lowerings of plugins, and NumPy references called on the host."""

from __future__ import annotations

from typing import Any

from mithril.backend import host_calls
from mithril.backend.plugin_lowering import PluginLowering, lowering_error_context
from mithril.graph import quoted

Call = Any  # codegen.call.Call and codegen.emit.FunctionEmitter, which import this module
FunctionEmitter = Any
CALLED = ("plugin_call", "reference_call")  # names in generated modules
IMPORT = f"from {host_calls.__name__} import "


def plugin_expression(lowering: PluginLowering, call: Call, writer: FunctionEmitter) -> str:
    """Return the call of a plugin's kernel, or the checked expression that its function returns."""
    label, target = lowering.label(call.node), lowering.target
    arguments: list[str] = []
    with lowering_error_context(label):
        if isinstance(target, str):
            function = f"lambda: {writer.fill_template(target, call)}"
        elif lowering.is_writer("call"):
            text = target(call)
            if text is not None and not isinstance(text, str):
                raise label.error(
                    f"returned {type(text).__name__}, expected source text",
                    "a function whose first parameter is 'call' returns an expression",
                    hint="name the parameters like the operands for a kernel on arrays",
                )
            function = f"lambda: {text or ', '.join(call.results)}"
        else:
            function = writer.imported(lowering.loads, f"{lowering.op}_kernel")
            operands = [writer.array(v) for v in call.node.operands]
            fields = {name: call.field(name) for name in ("dtype", "shape", *call.attributes)}
            pairs = lowering.arguments(call.node, operands, fields)
            arguments = [f"{name}={text}" if name else text for name, text in pairs]
    writer.module.add_import(IMPORT + "plugin_call")
    name = ", ".join(map(quoted, (label.op, label.backend, label.origin, label.where)))
    return f"plugin_call({', '.join([f'({name})', _types(call), function, *arguments])})"


def reference_expression(call: Call, writer: FunctionEmitter) -> str:
    """Return the call of an operation's NumPy reference."""
    host = writer.table.host
    assert host is not None
    node = call.node
    writer.module.add_import(IMPORT + "reference_call")
    attributes = [f"{name}={writer.literal(value, plain=True)}" for name, value in node.attributes.items()]
    absent = tuple(k for k, v in enumerate(node.operands) if v is None)
    positions = [f"absent={absent}"] if absent else []
    function = f"reference_call({', '.join([quoted(node.op.name), quoted(str(node.origin)), *positions, *attributes])})"
    operands = [writer.array(v) for v in node.operands if v is not None]
    text = f"{writer.helper(host)}({', '.join([function, _types(call), *operands])})"
    return text if len(node.results) > 1 else f"{text}[0]"


def _types(call: Call) -> str:
    """Return the dtypes and shapes of the results as source text."""
    pairs = [f"({call.dtype(v.dtype)}, {call.shape(v.type)})" for v in call.node.results]
    return f"({', '.join(pairs)},)"
