"""``compiled.export("model.gguf")``: one file with the model's weights, packed, and its graph as text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import mithril
from mithril import ops
from mithril.compiler import Exported, InputSpec, ProgramKey, ProgramKind, manifest_of
from mithril.derivatives import live_nodes
from mithril.graph import (
    Decisions,
    Dim,
    DType,
    Graph,
    Input,
    InputError,
    MithrilError,
    OptionError,
    ShapeError,
    TensorType,
    Value,
    decompose,
    to_text,
)
from mithril.system import files
from mithril_ggml import lowering
from mithril_ggml.gguf.architectures import export_architecture
from mithril_ggml.library.quant_types import stored
from mithril_ggml.weights.packed_weights import PackedArray, Store
from mithril_ggml.weights.quantize_recipe import QuantizationRecipe
from mithril_ggml.weights.weight_packing import Packing
from mithril_gguf.reader import MAX_NAME, StoredTensor
from mithril_gguf.writer import QUANTIZATION_VERSION, stored_tensor, write_gguf

InputTypes = tuple[tuple[str, TensorType], ...]
FORMAT = 1
ARCHITECTURE = "mithril"
INLINE = 16  # elements up to which a constant stays in the text of the graph
GENERAL = ("name", "author", "version", "description", "license", "license.name", "license.link", "url", "source.url")


def export_gguf(
    compiled: Any,
    path: str | os.PathLike[str],
    params: Mapping[str, Any] | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    quantize: str | Mapping[str, str | None] | None = None,
    metadata: Mapping[str, Any] | None = None,
    architecture: str | None = None,
) -> Exported:
    """Write a compiled model, of whatever backend, so that ``ml.load(path)`` runs it without its Python code.

    Parameters are the bound ones if none are given; ``quantize`` is as of ``GGMLBackend``, whose own choice counts
    where it is left out. ``metadata`` may have ``name``, ``author``, ``description``, ``license`` and such, which
    become GGUF's ``general.*``, and so do your own keys with a dot.

    With ``architecture="llama"``, a family that a plugin provides, the file has the layout of llama.cpp, without graph.
    """
    parameters = params if params is not None else compiled.params
    if parameters is None:
        raise InputError(
            "there are no parameters to export",
            hint="compiled.export(path, params=params), or compiled.bind(params) before",
        )
    recipe = QuantizationRecipe.of(quantize) or getattr(compiled.backend, "recipe", None) or QuantizationRecipe(None)
    if architecture is not None:
        export_architecture(compiled, path, architecture, parameters, recipe)
        return Exported(Path(os.fspath(path)))
    graph = decompose(_without_checks(inference_graph(compiled)), lowering.lowers, "ggml")
    states = dict(state) if state is not None else compiled.initial_state() if graph.with_role("state") else {}
    decisions = Decisions()
    to_numpy = compiled.backend.to_numpy
    arrays = {
        i.name: _array(i, (parameters if i.role == "param" else states), to_numpy)
        for i in graph.with_role("param", "state")
    }
    packing = Packing.of(graph, recipe, getattr(compiled.backend, "store", None) or Store(), decisions)
    packed = packing.packed(arrays) if packing is not None else {}
    if packing is not None:
        graph = _without_ternarize(graph, {e.input.value for e in packing.entries if e.ternary})
    _write(
        Path(os.fspath(path)), graph, arrays, packed, str(recipe), compiled.name, metadata or {}, manifest_of(compiled)
    )
    return Exported(Path(os.fspath(path)), decisions=decisions)


def inference_graph(compiled: Any) -> Graph:
    """Return the inference graph of the latest program with open sizes.

    Where there is none (the backend makes programs for exact sizes, or all were for training or for bound weights) it
    is made, with those sizes open that the user left so, if the model can do with that.
    """
    kinds = [(p, p.request.kind) for p in compiled.programs if p.request.bound is None]
    graphs: list[Graph] = [p.graph for p, kind in reversed(kinds) if not kind.training and not kind.of]
    open_graph = next((g for g in graphs if any(not i.type.is_static for i in g.with_role("input"))), None)
    if open_graph is not None:
        return open_graph
    types = _types(compiled)
    opened = _declared_types(compiled.specs, types)
    if opened != types:
        with suppress(MithrilError):
            return compiled.compiler.lowered(ProgramKey(opened, ProgramKind()))  # type: ignore[no-any-return]
    return graphs[0] if graphs else compiled.compiler.lowered(ProgramKey(types, ProgramKind()))


def _declared_types(specs: Mapping[str, InputSpec], types: InputTypes) -> InputTypes:
    """Return the declared types; inputs without a declared shape get one common symbolic leading size."""
    unsaid = {t.shape[0] for n, t in types if specs[n].shape is None and t.shape}
    batch = Dim("batch", 1)

    def opened(name: str, t: TensorType) -> TensorType:
        declared_shape = specs[name].shape
        if declared_shape is None:
            declared_shape = (batch, *t.shape[1:]) if t.shape and len(unsaid) == 1 else t.shape
        return TensorType(t.dtype, declared_shape)

    return tuple((n, opened(n, t)) for n, t in types)


def _without_checks(graph: Graph) -> Graph:
    """Remove the results of run-time checks: a program of the loaded graph adds them again."""
    results = tuple(r for r in graph.results if r.role != "check")
    nodes = live_nodes(graph.nodes, [r.value for r in results])
    return graph.replaced(nodes=tuple(nodes), results=results)


def _types(compiled: Any) -> InputTypes:
    """Return the input types of the latest program, or those that the layers expect."""
    if compiled.programs:
        return compiled.programs[-1].request.types  # type: ignore[no-any-return]
    try:
        return tuple((i.name, i.type) for i in compiled.interface.with_role("input"))
    except ShapeError:
        raise InputError(
            "nothing has been compiled yet, because the shapes of the inputs are not known",
            hint="ml.compile(..., shapes={...}), or call the model once",
        ) from None


def _without_ternarize(graph: Graph, weights: set[Value]) -> Graph:
    """Remove ``ternarize``: the file stores its results, and applying it twice would change them."""
    editor = graph.edit()
    for node in graph.nodes:
        if node.op is ops.ternarize and node.operands[0] in weights:
            editor.replace_value(node.result, node.operands[0])
            editor.erase(node)
    return editor.freeze()  # type: ignore[no-any-return]


def _array(i: Input, values: Mapping[str, Any], to_numpy: Any) -> Any:
    if i.name not in values:
        raise InputError(f"the {i.role} '{i.name}' is missing", facts=[f"given: {', '.join(list(values)[:20])}"])
    x = values[i.name]
    if isinstance(x, PackedArray):
        return x
    array = to_numpy(x) if not isinstance(x, np.ndarray) else x
    if array.shape != i.type.shape or array.dtype != i.type.dtype.numpy:
        raise InputError(f"'{i.name}' is {array.dtype}{list(array.shape)}, expected {i.type}")
    return array


def _write(
    target: Path,
    graph: Graph,
    arrays: Mapping[str, Any],
    packed: Mapping[str, PackedArray],
    recipe: str,
    name: str,
    metadata: Mapping[str, Any],
    plugins: str,
) -> None:
    """Write the file atomically, next to the target first."""
    for text in (name, *(i.name for i in graph.inputs), *graph.output_names):
        if not files.storable(text):
            raise InputError(f"a GGUF file cannot hold the name {text!r}", hint="rename it: names are UTF-8 there")
    graph, constants = _lifted(graph)
    names = _Names()
    transposed_names = []
    tensors = []
    for key, array in {**arrays, **constants}.items():
        if key in packed:
            tensors.append(_packed(names(key), packed[key]))
            transposed_names += [key] if packed[key].transposed else []
        elif np.size(array):
            tensors.append(_plain(names(key), np.asarray(array), graph.input(key).type.dtype))
    entries = {
        "general.architecture": ARCHITECTURE,
        **_general(name, metadata),
        "general.quantization_version": QUANTIZATION_VERSION,
        "mithril.format": np.uint32(FORMAT),
        "mithril.version": mithril.__version__,
        "mithril.plugins": plugins,
        "mithril.graph": to_text(graph, origins=False),
        "mithril.inputs": [i.name for i in graph.with_role("input")],
        "mithril.outputs": list(graph.output_names),
        "mithril.quantization": recipe,
        "mithril.names": names.full,
        "mithril.tensors": names.short,
        "mithril.turned": transposed_names,
    }
    with files.parts(target) as folder:
        write_gguf(folder / "part", entries, tensors)
        files.move(folder / "part", target)


def _lifted(graph: Graph) -> tuple[Graph, dict[str, Any]]:
    """Large constants as parameters, whose elements are tensors of the file."""
    inputs, constants = [], {}
    for i in graph.inputs:
        if i.role == "constant" and i.data is not None and i.data.size > INLINE:
            constants[i.name] = i.data
            i = Input(i.value, "param", None, i.tags)
        inputs.append(i)
    return graph.replaced(inputs=tuple(inputs)), constants


class _Names:
    """Names that ggml takes whole, for parameters with names of any length."""

    def __init__(self) -> None:
        self.full: list[str] = []
        self.short: list[str] = []

    def __call__(self, name: str) -> str:
        short = (
            name if len(name.encode()) <= MAX_NAME and not name.startswith("tensor.") else f"tensor.{len(self.full)}"
        )
        self.full.append(name)
        self.short.append(short)
        return short


def _general(name: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    entries: dict[str, Any] = {"general.name": str(metadata.get("name", name))}
    for key, value in metadata.items():
        if key == "name":
            continue
        if key in GENERAL:
            entries[f"general.{key}"] = str(value)
        elif "." not in key or key.startswith(("general.", "mithril.", "GGUF.")):
            raise OptionError(
                f"metadata '{key}' has no place in a GGUF file",
                facts=[f"known: {', '.join(GENERAL)}"],
                hint="keys of your own have a dot: 'mycompany.ticket'",
            )
        else:
            entries[key] = _entry(key, value)
    return entries


def _entry(key: str, value: Any) -> Any:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    kinds = {type(x) for x in values}
    if len(kinds) != 1 or not kinds <= {bool, int, float, str} or not all(map(_fits, values)):
        raise OptionError(f"metadata '{key}' cannot be {value!r}", facts=["accepted: texts, numbers, lists of them"])
    return values if isinstance(value, (list, tuple)) else value


def _fits(value: Any) -> bool:
    """Whether this is a number of 64 bits or a text of UTF-8."""
    return (
        files.storable(value) if isinstance(value, str) else not isinstance(value, int) or -(1 << 63) <= value < 1 << 63
    )


def _packed(name: str, packed: PackedArray) -> StoredTensor:
    shape = packed.shape[::-1] if packed.transposed else packed.shape
    return StoredTensor(name, shape, packed.kind.code, packed.data)


def _plain(name: str, array: Any, dtype: DType) -> StoredTensor:
    """Return an array, or its bytes as another type if GGUF lacks its dtype; the graph has dtype and shape."""
    return stored_tensor(name, array if 1 <= array.ndim <= 4 else array.reshape(-1), stored(dtype))
