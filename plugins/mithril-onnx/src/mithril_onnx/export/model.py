"""``compiled.export("model.onnx")``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnx.helper as helper

from mithril.compiler import Exported, manifest_of
from mithril.graph import (
    Graph,
    InputError,
    Node,
    ShapeError,
    TensorType,
    __version__,
    decompose,
    result_name,
)
from mithril_onnx.export import nn_rows as _nn_rows, rows as _rows  # noqa: F401  (they register the rows)
from mithril_onnx.export.table import row_for
from mithril_onnx.export.writer import Writer, tensor_of

OLDEST, NEWEST = 17, 24
# IR versions that runtimes of these opsets read.
IR_VERSIONS = {17: 8, 18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12}
EXTERNAL = 1_500_000_000  # bytes of weights from which on they are stored in a file of their own


def export(
    compiled: Any,
    path: str | os.PathLike[str],
    params: Mapping[str, Any] | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    opset: int = 23,
    external: bool | None = None,
) -> Exported:
    """Write a compiled model, of any backend, as an ONNX file.

    Parameters, by default the bound ones, are initializers with their names. ``external`` stores them in
    ``path + ".data"``, the default for more than 1.5 GB. The file is checked by ``onnx.checker``.
    """
    if not OLDEST <= opset <= NEWEST:
        raise InputError(f"opset={opset} cannot be written", facts=[f"accepted: {OLDEST} to {NEWEST}"])
    model = to_onnx(compiled, opset, params, state)
    size = sum(len(t.raw_data) for t in model.graph.initializer)
    target = Path(os.fspath(path))
    if external or (external is None and size > EXTERNAL):
        onnx.save_model(
            model, str(target), save_as_external_data=True, all_tensors_to_one_file=True,
            location=target.name + ".data", size_threshold=1024,
        )  # fmt: skip
        onnx.checker.check_model(str(target), full_check=True)
    else:
        onnx.checker.check_model(model, full_check=True)
        _write(target, model.SerializeToString())
    return Exported(target)


def _write(path: Path, content: bytes) -> None:
    from mithril.system import files

    files.write(path, content)


def to_onnx(
    compiled: Any, opset: int, params: Mapping[str, Any] | None = None, state: Mapping[str, Any] | None = None
) -> Any:
    """Return a compiled model as an ``onnx.ModelProto``."""

    def lowers(node: Node) -> bool:
        return node.is_constant or row_for(node, opset) is not None

    graph = decompose(inference_graph(compiled), lowers, f"onnx, opset {opset}")
    writer = Writer(opset)
    arrays = _arrays(compiled, graph, params if params is not None else compiled.params, state)
    inputs = _inputs(writer, graph, arrays)
    writer.write(graph)
    outputs = _outputs(writer, graph)
    proto = helper.make_graph(
        [*writer.prologue, *writer.nodes], graph.name or "model", inputs, outputs, writer.initializers
    )
    model = helper.make_model(
        proto, opset_imports=[helper.make_opsetid("", opset)], producer_name="mithril", producer_version=__version__,
        ir_version=IR_VERSIONS[opset],
    )  # fmt: skip
    helper.set_model_props(model, {"mithril.plugins": manifest_of(compiled)})
    return model


def inference_graph(compiled: Any) -> Graph:
    """Return the inference graph before any pass, with the sizes open that the model leaves open."""
    specs = compiled.specs
    declared = dict(compiled.programs[-1].request.types) if compiled.programs else {}
    try:
        declared = declared or {i.name: i.type for i in compiled.interface.with_role("input")}
    except ShapeError:
        raise InputError(
            "nothing has been compiled yet, because the shapes of the inputs are not known",
            hint="ml.compile(..., shapes={...}), or call the model once",
        ) from None
    types = {
        n: TensorType(t.dtype, specs[n].shape if n in specs and specs[n].shape is not None else t.shape)
        for n, t in declared.items()
    }
    graph: Graph = compiled.compiler.pipeline.trace(types, training=False)
    return graph


def _arrays(
    compiled: Any, graph: Graph, params: Mapping[str, Any] | None, state: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the parameters, and the states that a call does not change, as NumPy arrays."""
    to_numpy = compiled.backend.to_numpy
    arrays: dict[str, Any] = {}
    param_inputs = graph.with_role("param")
    if param_inputs:
        if params is None:
            raise InputError(
                "there are no parameters to export",
                hint="compiled.export(path, params), or compiled.bind(params) before",
            )
        arrays |= {i.name: np.asarray(to_numpy(params[i.name])) for i in param_inputs}
    if graph.with_role("state"):
        states: Mapping[str, Any] = compiled.initial_state() if state is None else state
        updated = {r.name for r in graph.results_of("state")}
        arrays |= {
            i.name: np.asarray(to_numpy(states[i.name])) for i in graph.with_role("state") if i.name not in updated
        }
    return arrays


def _inputs(writer: Writer, graph: Graph, arrays: Mapping[str, Any]) -> list[Any]:
    """Name the inputs of the graph and return those of the file."""
    declared = []
    for i in graph.inputs:
        if i.role == "constant":
            writer.of[i.value] = writer.constant(i.data, stem=i.name)
        elif i.name in arrays:
            name = writer.of[i.value] = writer.names.new(i.name)
            writer.initializers.append(tensor_of(arrays[i.name].astype(i.type.dtype.numpy, copy=False), name))
        else:
            name = writer.of[i.value] = writer.names.new(result_name("state", i.name) if i.role == "state" else i.name)
            declared.append(writer.declared(name, i.value))
            for axis, d in enumerate(i.type.shape):
                if not isinstance(d, int) and d.symbol is not None:
                    writer.symbols.setdefault(d.symbol.name, (name, axis))
    for result in graph.results:
        writer.names.used.add(_result_name(result))
    return declared


def _result_name(result: Any) -> str:
    return f"new_state/{result.name}" if result.role == "state" else str(result.name)


def _outputs(writer: Writer, graph: Graph) -> list[Any]:
    declared = []
    for result in graph.results:
        name = _result_name(result)
        writer.nodes.append(
            helper.make_node("Identity", [writer.name(result.value)], [name], name=writer.names.new(name))
        )
        declared.append(writer.declared(name, result.value))
    return declared
