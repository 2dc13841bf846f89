"""Malformed ONNX files: seeded changes of valid ones, and the outcome of importing each."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from mithril.base import MithrilError
from mithril_onnx.model import from_onnx

HUGE = (-1, 0, 1 << 31, (1 << 62) + 7, 10**9)


@dataclass(frozen=True)
class Attempt:
    """One changed file: ``error`` is None if it still imports."""

    mutation: str
    error: BaseException | None

    @property
    def fine(self) -> bool:
        return self.error is None or isinstance(self.error, MithrilError)


def sources() -> list[bytes]:
    """Return valid files: node tests of the standard with several operators, bodies and initializers."""
    from mithril_onnx.node_tests import cases

    models = [c.model.SerializeToString() for c in cases() if c.model.ByteSize() < 20_000]
    return sorted(models, key=len)[::7]


def attempts(files: Sequence[bytes], rng: random.Random, count: int) -> Iterator[Attempt]:
    """Change, import and trace ``count`` files."""
    for _ in range(count):
        content = rng.choice(files)
        kind = rng.choice(("truncated", "flipped", "sizes", "attribute", "names", "types", "operands"))
        if kind == "truncated":
            changed = content[: rng.randrange(len(content))]
        elif kind == "flipped":
            changed = _flipped(content, rng)
        else:
            changed = _structural(content, kind, rng)
        yield Attempt(kind, _outcome(changed))


def _outcome(content: bytes) -> BaseException | None:
    from mithril import compile

    try:
        model = from_onnx(content)
        compile(model, "numpy", inference=True)
    except Exception as error:
        return error
    return None


def _flipped(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _structural(content: bytes, kind: str, rng: random.Random) -> bytes:
    """Change one field of the parsed file."""
    model = onnx.ModelProto.FromString(content)
    graph = model.graph
    node: Any = rng.choice(graph.node) if graph.node else None
    if kind == "sizes":
        shapes = [i.type.tensor_type.shape for i in graph.input if i.type.tensor_type.shape.dim]
        tensors = [*graph.initializer, *(a.t for n in graph.node for a in n.attribute if a.HasField("t"))]
        if tensors and rng.random() < 0.7:
            tensor = rng.choice(tensors)
            if tensor.dims:
                tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(HUGE)
            tensor.data_type = rng.randrange(30) if rng.random() < 0.3 else tensor.data_type
        elif shapes:
            shape = rng.choice(shapes)
            shape.dim[rng.randrange(len(shape.dim))].dim_value = rng.choice(HUGE)
    elif kind == "types":
        if graph.input:
            rng.choice(graph.input).type.tensor_type.elem_type = rng.randrange(30)
        model.opset_import[0].version = rng.choice((-1, 0, 7, 13, 1 << 40))
    elif node is not None and kind == "attribute":
        _attribute(node, rng)
    elif node is not None and kind == "operands":
        for _ in range(rng.randint(1, 3)):
            if node.input and rng.random() < 0.5:
                node.input.pop()
            else:
                node.input.append(rng.choice([*node.output, *node.input, ""]))
    elif node is not None:
        node.op_type = rng.choice(
            ["Add", "Reshape", "Loop", "Conv", "Resize", "Attention", "LSTM", "Nothing", "Gather"]
        )
        if node.output and rng.random() < 0.3:
            node.output.append(node.output[0])
    return bytes(model.SerializeToString())


def _attribute(node: Any, rng: random.Random) -> None:
    if not node.attribute or rng.random() < 0.2:
        node.attribute.append(onnx.helper.make_attribute(rng.choice(["axis", "pads", "bogus"]), rng.choice(HUGE)))
        return
    a = rng.choice(node.attribute)
    choice = rng.randrange(4)
    if choice == 0:
        a.type = rng.randrange(15)
    elif choice == 1:
        a.i = rng.choice(HUGE)
        for k in range(len(a.ints)):
            a.ints[k] = rng.choice(HUGE)
    elif choice == 2:
        a.f = float("nan")
        a.s = b"\xff\xfe"
        del a.ints[:]
    else:
        a.name = rng.choice(["axis", "kernel_shape", "x", ""])
