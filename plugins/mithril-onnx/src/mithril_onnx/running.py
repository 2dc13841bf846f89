"""ONNX files run by onnxruntime, else by the reference evaluator of onnx, for comparison with the imported model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import onnx

from mithril_onnx.tensors import Array


def run_file(source: Any, names: Sequence[str], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return tensors of a file by their names, in this order; sequences and sparse tensors are left out."""
    model = _complete(source)
    declared = {o.name for o in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in declared)
    feeds = {i.name: inputs[i.name] for i in model.graph.input if i.name in inputs}
    results = (_by_onnxruntime if find_spec("onnxruntime") else _by_reference)(model, names, feeds)
    return {n: x for n, x in zip(names, results, strict=True) if isinstance(x, np.ndarray) and x.dtype.kind in "biuf"}


def _complete(source: Any) -> onnx.ModelProto:
    """Return a copy of the model with all its tensors."""
    if isinstance(source, (str, os.PathLike)):
        return onnx.load(os.fspath(source))
    model = onnx.ModelProto()
    model.ParseFromString(source if isinstance(source, bytes) else source.SerializeToString())
    return model


def _by_onnxruntime(model: onnx.ModelProto, names: Sequence[str], feeds: dict[str, Array]) -> list[Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(list(names), feeds))


def _by_reference(model: onnx.ModelProto, names: Sequence[str], feeds: dict[str, Array]) -> list[Any]:
    from onnx.reference import ReferenceEvaluator

    return list(ReferenceEvaluator(model).run(list(names), feeds))
