"""Files run by the interpreter of ai-edge-litert, for comparison with the imported model."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any

from mithril.graph import InputError
from mithril_tflite.flatbuffer import Array


def run_file(source: Any, graph: int, indices: Collection[int], inputs: Mapping[int, Array]) -> dict[int, Array]:
    """Return tensors of a file by their indices, computed by the reference kernels."""
    if find_spec("ai_edge_litert") is None:
        raise InputError("a TensorFlow Lite file runs by its interpreter", hint="pip install ai-edge-litert")
    if graph:
        raise InputError("the interpreter runs the first graph of a file", hint="compare a model without signature=")
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    data = (
        {"model_content": bytes(source)}
        if isinstance(source, (bytes, bytearray))
        else {"model_path": os.fspath(source)}
    )
    interpreter = Interpreter(
        **data,
        experimental_op_resolver_type=OpResolverType.BUILTIN_REF,
        experimental_preserve_all_tensors=True,
    )
    for index, x in inputs.items():
        interpreter.resize_tensor_input(index, list(x.shape))
    interpreter.allocate_tensors()
    for index, x in inputs.items():
        interpreter.set_tensor(index, x)
    interpreter.invoke()
    return {k: interpreter.get_tensor(k) for k in indices}
