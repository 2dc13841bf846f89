"""Rows of products, convolutions, pools, norms, attention, quantization and control flow."""

from __future__ import annotations

import string

import numpy as np
import onnx.helper as helper

from mithril.graph import equal
from mithril_onnx.export.table import row
from mithril_onnx.export.writer import Writer
from mithril_onnx.tensors import code_of_dtype


@row("matmul")
def _matmul(w, node, a, b):
    return w.node("MatMul", a, b, stem=node.result.name)


@row("linear")
def _linear(w, node, x, weight, bias):
    if len(node.operands[0].shape) == 2:
        return w.node("Gemm", x, weight, bias, transB=1, stem=node.result.name)
    y = w.node("MatMul", x, w.node("Transpose", weight, perm=[1, 0]), stem=node.result.name)
    return w.node("Add", y, bias) if bias else y


@row("dot", reads=("contract_a", "contract_b", "batch_a", "batch_b"))
def _dot(w, node, a, b):
    attributes = node.attributes
    letters = iter(string.ascii_lowercase)
    left = [next(letters) for _ in node.operands[0].shape]
    right = [""] * len(node.operands[1].shape)
    for i, j in (
        *zip(attributes["contract_a"], attributes["contract_b"]),
        *zip(attributes["batch_a"], attributes["batch_b"]),
    ):
        right[j] = left[i]
    right = [c or next(letters) for c in right]
    batch = [left[i] for i in attributes["batch_a"]]
    contracted = {left[i] for i in attributes["contract_a"]}
    out = [*batch, *(c for c in left if c not in contracted and c not in batch), *(c for c in right if c not in left)]
    return w.node("Einsum", a, b, equation=f"{''.join(left)},{''.join(right)}->{''.join(out)}")


@row("einsum", reads=("equation",), when=lambda node: "..." not in node.attributes["equation"])
def _einsum(w, node, *xs):
    return w.node("Einsum", *xs, equation=node.attributes["equation"])


def _windows(node):
    a = node.attributes
    out = {"strides": list(a["stride"]), "pads": [p for p, _ in a["padding"]] + [p for _, p in a["padding"]]}
    if "dilation" in a:
        out["dilations"] = list(a["dilation"])
    return out


@row("conv", reads=("stride", "padding", "dilation", "groups"))
def _conv(w, node, x, kernel):
    return w.node("Conv", x, kernel, group=node.attributes["groups"], stem=node.result.name, **_windows(node))


@row("conv_transpose", reads=("stride", "padding", "dilation", "groups", "output_padding"))
def _conv_transpose(w, node, x, kernel):
    a = node.attributes
    extra = list(a["output_padding"])
    return w.node(
        "ConvTranspose", x, kernel, group=a["groups"], output_padding=extra if any(extra) else None, **_windows(node)
    )


@row("max_pool", reads=("kernel", "stride", "padding", "dilation"))
def _max_pool(w, node, x):
    return w.node("MaxPool", x, kernel_shape=list(node.attributes["kernel"]), **_windows(node))


@row("avg_pool", reads=("kernel", "stride", "padding", "count_include_pad"))
def _avg_pool(w, node, x):
    a = node.attributes
    return w.node(
        "AveragePool",
        x,
        kernel_shape=list(a["kernel"]),
        count_include_pad=int(a["count_include_pad"]),
        **_windows(node),
    )


@row("softmax", "log_softmax", reads=("axis",))
def _softmax(w, node, x):
    kind = "Softmax" if node.op.name == "softmax" else "LogSoftmax"
    return w.node(kind, x, axis=node.attributes["axis"], stem=node.result.name)


def _trailing(node):
    rank = len(node.operands[0].shape)
    axes = sorted(a % rank for a in node.attributes["axes"])
    return axes == list(range(rank - len(axes), rank)) and node.operands[1] is not None


@row("layer_norm", reads=("axes", "eps"), since=17, when=_trailing)
def _layer_norm(w, node, x, scale, bias):
    axis = -len(node.attributes["axes"])
    return w.node("LayerNormalization", x, scale, bias, axis=axis, epsilon=float(node.attributes["eps"]))


def _last_axis(node):
    return node.operands[1] is not None and node.attributes["axis"] in (-1, len(node.operands[0].shape) - 1)


@row("rms_norm", reads=("axis", "eps"), since=23, when=_last_axis)
def _rms_norm(w, node, x, scale):
    return w.node("RMSNormalization", x, scale, axis=-1, epsilon=float(node.attributes["eps"]))


@row("batch_norm", reads=("eps",))
def _batch_norm(w, node, x, scale, bias, mean, var):
    return w.node("BatchNormalization", x, scale, bias, mean, var, epsilon=float(node.attributes["eps"]))


@row("instance_norm", reads=("eps",), when=lambda node: node.operands[1] is not None and node.operands[2] is not None)
def _instance_norm(w, node, x, scale, bias):
    return w.node("InstanceNormalization", x, scale, bias, epsilon=float(node.attributes["eps"]))


@row(
    "group_norm", reads=("groups", "eps"), since=21,
    when=lambda node: node.operands[1] is not None and node.operands[2] is not None,
)  # fmt: skip
def _group_norm(w, node, x, scale, bias):
    a = node.attributes
    return w.node("GroupNormalization", x, scale, bias, num_groups=a["groups"], epsilon=float(a["eps"]))


def _aligned(node):
    """Whether causality has its meaning of ONNX: the first query attends to the first key only."""
    q, k = node.operands[:2]
    if not node.attributes["causal"]:
        return True
    return node.operands[3] is None and equal(q.shape[2], k.shape[2]) is True


@row("attention", reads=("causal", "scale"), since=23, when=_aligned)
def _attention(w, node, q, k, v, mask):
    scale = node.attributes["scale"]
    if node.operands[3] is not None:
        # the standard broadcasts a mask; onnxruntime wants a row for each query and a column for each key
        rows = (node.operands[0].shape[2], node.operands[1].shape[2])
        declared = node.operands[3].shape
        if declared[-2:] != rows:
            mask = w.node("Expand", mask, w.shape((*declared[:-2], *rows)))
    return w.node(
        "Attention", q, k, v, mask, is_causal=int(node.attributes["causal"]),
        scale=None if scale is None else float(scale), stem=node.result.name,
    )  # fmt: skip


@row("quantize", reads=("dtype", "axis"))
def _quantize(w, node, x, scale, zero):
    a = node.attributes
    zero = w.cast(zero, a["dtype"]) if zero else w.constant(np.zeros(node.operands[1].shape, a["dtype"].numpy))
    return w.node("QuantizeLinear", x, scale, zero, axis=a["axis"])


def _quantized(node):
    return node.operands[0].dtype.name in ("int8", "uint8", "int32")


@row("dequantize", reads=("axis",), when=_quantized)
def _dequantize(w, node, x, scale, zero):
    if zero and node.operands[2].dtype is not node.operands[0].dtype:
        zero = w.cast(zero, node.operands[0].dtype)
    return w.node("DequantizeLinear", x, scale, zero, axis=node.attributes["axis"])


# -- images at computed positions ----------------------------------------------------------------------------------
@row("grid_sample", reads=("mode", "padding_mode", "align_corners"), since=16)
def _grid_sample(w, node, x, grid):
    a = node.attributes
    # GridSample has other names of its modes since opset 20.
    mode = a["mode"] if w.opset < 20 else {"bilinear": "linear", "bicubic": "cubic"}.get(a["mode"], a["mode"])
    settings = {"padding_mode": a["padding_mode"], "align_corners": int(a["align_corners"])}
    return w.node("GridSample", x, grid, mode=mode, **settings)


# -- control flow -------------------------------------------------------------------------------------------------
def _body(w, region, names, extra=()):
    """Return a region as an ONNX graph; ``names`` are those of its inputs, ``extra`` leading outputs."""
    inner = Writer(w.opset, w)
    for i, name in zip(region.arguments, names, strict=True):
        inner.of[i.value] = name
    inner.write(region)
    return inner, [inner.node("Identity", inner.name(v)) for v in region.outputs]


@row("if")
def _if(w, node, condition, *operands):
    graphs = []
    for region in node.regions:
        inner, outputs = _body(w, region, operands)
        declared = [inner.declared(name, v) for name, v in zip(outputs, region.outputs, strict=True)]
        graphs.append(helper.make_graph(inner.nodes, w.names.new("branch"), [], declared))
    return w.node("If", condition, results=len(node.results), then_branch=graphs[0], else_branch=graphs[1])


@row("while", reads=("states", "max_trips"))
def _while(w, node, *operands):
    count, trips = node.attributes["states"], node.attributes["max_trips"]
    states, rest = operands[:count], operands[count:]
    test, first = _body(w, node.regions[0], operands)
    w.nodes += test.nodes
    inner = Writer(w.opset, w)
    trip, going = w.names.new("trip"), w.names.new("going")
    names = [w.names.new("state") for _ in states]
    for i, name in zip(node.regions[1].arguments, [*names, *rest], strict=True):
        inner.of[i.value] = name
    inner.write(node.regions[1])
    after = [inner.node("Identity", inner.name(v)) for v in node.regions[1].outputs]
    again, holds = _body(inner, node.regions[0], [*after, *rest])
    inner.nodes += again.nodes
    inputs = [
        helper.make_tensor_value_info(trip, 7, []),
        helper.make_tensor_value_info(going, 9, []),
        *(inner.declared(n, v) for n, v in zip(names, node.operands[:count], strict=True)),
    ]
    outputs = [
        helper.make_tensor_value_info(holds[0], 9, []),
        *(inner.declared(n, v) for n, v in zip(after, node.results, strict=True)),
    ]
    body = helper.make_graph(inner.nodes, w.names.new("body"), inputs, outputs)
    limit = "" if trips is None else w.constant(np.asarray(trips, np.int64))
    return w.node("Loop", limit, first[0], *states, results=count, body=body)


@row("scan", reads=("carries", "sequences", "length", "reverse"))
def _scan(w, node, *operands):
    a = node.attributes
    if not a["sequences"]:  # Scan of ONNX needs a sequence
        return _counted_loop(w, node, operands)
    count, sequences = a["carries"], a["sequences"]
    names = [w.names.new("element") for _ in range(count + sequences)]
    region = node.regions[0]
    inner, outputs = _body(w, region, [*names, *operands[count + sequences :]])
    inputs = [inner.declared(n, i.value) for n, i in zip(names, region.arguments, strict=False)]
    declared = [inner.declared(n, v) for n, v in zip(outputs, region.outputs, strict=True)]
    body = helper.make_graph(inner.nodes, w.names.new("body"), inputs, declared)
    stacked = len(node.results) - count
    direction = [1] if a["reverse"] else [0]
    return w.node(
        "Scan", *operands[: count + sequences], results=len(node.results), body=body, num_scan_inputs=sequences,
        scan_input_directions=direction * sequences, scan_output_directions=direction * stacked if stacked else None,
    )  # fmt: skip


@row("cumprod", reads=("axis", "reverse", "exclusive"))
def _cumprod(w, node, x):
    """Write a Scan of products: CumProd of the standard needs opset 26, which is beyond the opsets written here."""
    a, code = node.attributes, code_of_dtype(node.result.dtype)
    rest = [d for k, d in enumerate(node.result.shape) if k != a["axis"]]
    one = w.constant(np.ones((), node.result.dtype.name))
    before, element, after = (w.names.new(stem) for stem in ("before", "element", "after"))
    inner = Writer(w.opset, w)
    product = inner.node("Mul", before, element)
    shown = before if a["exclusive"] else product
    inner.nodes.append(helper.make_node("Identity", [shown], [after], name=after))
    values = [helper.make_tensor_value_info(name, code, None) for name in (before, element, product, after)]
    body = helper.make_graph(inner.nodes, w.names.new("body"), values[:2], values[2:])
    axes, directions = [a["axis"]], [int(a["reverse"])]
    first = w.node("Expand", one, w.shape(rest))
    _, products = w.node(
        "Scan", first, x, results=2, body=body, num_scan_inputs=1, scan_input_axes=axes, scan_output_axes=axes,
        scan_input_directions=directions, scan_output_directions=directions,
    )  # fmt: skip
    return products


def _counted_loop(w, node, operands):
    """Return the results of a scan without sequences: a Loop with a number of trips, and no condition."""
    a, count = node.attributes, node.attributes["carries"]
    region = node.regions[0]
    trip, going = w.names.new("trip"), w.names.new("going")
    names = [w.names.new("carry") for _ in range(count)]
    inner, outputs = _body(w, region, [*names, *operands[count:]])
    inputs = [
        helper.make_tensor_value_info(trip, 7, []),
        helper.make_tensor_value_info(going, 9, []),
        *(inner.declared(n, i.value) for n, i in zip(names, region.arguments, strict=False)),
    ]
    again = inner.node("Identity", going)
    declared = [
        helper.make_tensor_value_info(again, 9, []),
        *(inner.declared(n, v) for n, v in zip(outputs, region.outputs, strict=True)),
    ]
    body = helper.make_graph(inner.nodes, w.names.new("body"), inputs, declared)
    trips = w.node("Squeeze", w.shape([a["length"]]))
    results = w.node("Loop", trips, "", *operands[:count], results=len(node.results), body=body)
    if not a["reverse"] or len(node.results) == count:
        return results
    first, last, step = w.ints([-1]), w.ints([-(2**62)]), w.ints([-1])
    stacked = [w.node("Slice", y, first, last, w.ints([0]), step) for y in results[count:]]
    return [*results[:count], *stacked]
