"""Changes of ONNX files: of their bytes, and of one field of the parsed file."""

from functools import cache, partial

import onnx

from mithril_onnx.node_tests import cases
from mithril_testing.damaged_files import flipped, truncated

HUGE = (-1, 0, 1 << 31, (1 << 62) + 7, 10**9)


@cache
def sources():
    """Return valid files: node tests of the standard with several operators, bodies and initializers."""
    models = [c.model.SerializeToString() for c in cases() if c.model.ByteSize() < 20_000]
    return sorted(models, key=len)[::7]


def changed_field(content, rng, kind):
    """Change one field of the parsed file."""
    model = onnx.ModelProto.FromString(content)
    graph = model.graph
    node = rng.choice(graph.node) if graph.node else None
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
    return model.SerializeToString()


def _attribute(node, rng):
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


CHANGES = {
    "truncated": truncated,
    "flipped": flipped,
    **{k: partial(changed_field, kind=k) for k in ("sizes", "attribute", "names", "types", "operands")},
}
