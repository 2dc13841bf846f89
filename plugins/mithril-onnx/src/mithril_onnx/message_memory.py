"""The memory of the messages of a file, counted before protobuf reads them: two bytes can be a message."""

from __future__ import annotations

import onnx

from mithril.graph import allowed_memory, check_memory
from mithril_onnx.mapped import fields

NODE, MESSAGE, TEXT = 900, 300, 24  # bytes with the objects of Python, measured for empty ones
SMALLEST = 2  # bytes of an empty message


def check_messages(content: bytes, size: int, description: str) -> None:
    """Raise InputError if the messages of a file of ``size`` bytes need more memory than such a file may."""
    if len(content) // SMALLEST * NODE > allowed_memory(size):
        check_memory(memory_of_messages(content), size, f"the graph of {description}")


def memory_of_messages(content: bytes) -> int:
    """Return the bytes that protobuf needs for a model; raise IrregularError for other bytes."""
    total, pending = 0, [(0, len(content), onnx.ModelProto.DESCRIPTOR)]
    while pending:
        start, stop, kind = pending.pop()
        for number, _, body, after in fields(content, start, stop):
            field = kind.fields_by_number.get(number)
            if field is None:
                continue
            if field.message_type is None:
                total += TEXT if field.type in (field.TYPE_STRING, field.TYPE_BYTES) else 0
                continue
            total += NODE if field.message_type.name == "NodeProto" else MESSAGE
            pending.append((body, after, field.message_type))
    return total
