"""Execution of per-device graphs on NumPy arrays: all devices run each operation together."""

from __future__ import annotations

import itertools

import numpy as np

from mithril_parallel.mesh import Mesh
from mithril_parallel.placing.strategy import choose
from mithril_parallel.sharding.spmd import partition_graph


def shard(graph, axes, *, splits=None, fsdp=False):
    """Return the graph of one device of a training step; gradients and new values are split like the old values."""
    strategy = choose(graph, Mesh(axes), splits, fsdp=fsdp, uneven=True)
    types = {i.name: i.type for i in graph.arguments if i.role != "cotangent"}
    outputs = {
        r.name: strategy.splits.get(r.of, (None,) * r.value.ndim)
        for r in graph.results_of("gradient", "state")
        if types.get(r.of) == r.type
    }
    return partition_graph(graph, axes, strategy.splits, outputs=outputs), strategy.unsplit


def coordinates(mesh):
    names = list(mesh.axes)
    return [
        dict(zip(names, index, strict=True)) for index in itertools.product(*(range(n) for n in mesh.axes.values()))
    ]


def part(x, split, mesh, coordinate):
    for k, axis in enumerate(split):
        if axis is not None:
            x = np.split(x, mesh.size(axis), k)[coordinate[axis]]
    return x


def joined(parts, split, mesh):
    """Return an array assembled from the parts of all devices; replicated parts must agree."""
    devices = coordinates(mesh)
    for k, axis in enumerate(split):
        if axis is None:
            continue
        groups = {}
        for coordinate, x in zip(devices, parts, strict=True):
            groups.setdefault(tuple((a, n) for a, n in coordinate.items() if a != axis), []).append(x)
        merged = {key: np.concatenate(arrays, k) for key, arrays in groups.items()}
        parts = [merged[tuple((a, n) for a, n in coordinate.items() if a != axis)] for coordinate in devices]
    for x in parts[1:]:
        np.testing.assert_array_equal(x, parts[0])
    return parts[0]


def exchanged(node, xs, mesh):
    axis = node.attributes["mesh"]
    devices = coordinates(mesh)
    groups = {}
    for k, coordinate in enumerate(devices):
        groups.setdefault(tuple((a, n) for a, n in coordinate.items() if a != axis), []).append(k)
    out = [None] * len(xs)
    for members in groups.values():
        inputs = [xs[k] for k in members]
        if node.op.name == "mesh.all_gather":
            results = [np.concatenate(inputs, node.attributes["axis"])] * len(members)
        elif node.op.name == "mesh.all_to_all":
            parts = [np.split(x, len(members), node.attributes["split"]) for x in inputs]
            results = [np.concatenate(received, node.attributes["axis"]) for received in zip(*parts, strict=True)]
        else:
            kind = {"sum": np.add, "max": np.maximum, "min": np.minimum}[node.attributes.get("kind", "sum")]
            total = kind.reduce([np.asarray(x) for x in inputs]).astype(inputs[0].dtype)
            scattered = node.op.name == "mesh.reduce_scatter"
            results = np.split(total, len(members), node.attributes["axis"]) if scattered else [total] * len(members)
        for k, x in zip(members, results, strict=True):
            out[k] = x
    return out


def run(sharded, arrays):
    """Return the outputs by name, assembled from all devices."""
    mesh, graph = sharded.mesh, sharded.graph
    devices = coordinates(mesh)
    values = {}
    for i in graph.inputs:
        if i.data is not None:
            values[i.value] = [i.data] * len(devices)
        elif i.name in sharded.indices:
            values[i.value] = [np.int32(coordinate[sharded.indices[i.name]]) for coordinate in devices]
        else:
            values[i.value] = [part(arrays[i.name], sharded.inputs[i.name], mesh, coordinate) for coordinate in devices]
    walk(graph, values, mesh)
    outputs = {}
    for name, v in zip(graph.output_names, graph.outputs, strict=True):
        outputs[name] = joined(values[v], sharded.outputs[name].split, mesh)
    return outputs


def walk(graph, values, mesh):
    for node in graph.nodes:
        if node.op.name.startswith("mesh."):
            values[node.result] = exchanged(node, values[node.operands[0]], mesh)
            continue
        if node.op.name == "scan" and any(n.op.name.startswith("mesh.") for n in node.regions[0].nodes):
            loop(node, values, mesh)
            continue
        results = [
            node.op.evaluate(
                [None if v is None else values[v][k] for v in node.operands], node.attributes, node.regions
            )
            for k in range(len(coordinates(mesh)))
        ]
        for k, v in enumerate(node.results):
            values[v] = [x[k] if isinstance(x, tuple) else x for x in results]


def loop(node, values, mesh):
    """Run a scan whose body contains collectives: all devices run each iteration together."""
    carries, sequences = node.attributes["carries"], node.attributes["sequences"]
    body, operands = node.regions[0], [values[v] for v in node.operands]
    state, rows = operands[:carries], []
    length = node.attributes["length"]
    for step in reversed(range(length)) if node.attributes["reverse"] else range(length):
        xs = [[x[step] for x in v] for v in operands[carries : carries + sequences]]
        inner = dict(
            zip([i.value for i in body.arguments], [*state, *xs, *operands[carries + sequences :]], strict=True)
        )
        inner |= {i.value: [i.data] * len(coordinates(mesh)) for i in body.inputs if i.data is not None}
        walk(body, inner, mesh)
        results = [inner[v] for v in body.outputs]
        state = results[:carries]
        rows.append(results[carries:])
    if node.attributes["reverse"]:
        rows.reverse()
    for k, v in enumerate(node.results):
        if k < carries:
            values[v] = state[k]
        else:
            steps = [row[k - carries] for row in rows]
            values[v] = [np.stack([s[d] for s in steps]) for d in range(len(coordinates(mesh)))]
