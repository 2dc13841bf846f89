"""GGUF files of model families that plugins know, in the layout of llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mithril import plugins
from mithril.backend import Backend
from mithril.compiler import CompiledModel, compile, make_backend, resolve_options
from mithril.graph import InputError
from mithril.system import files
from mithril_ggml.backend import GGMLBackend
from mithril_ggml.library.quant_types import QuantType, by_code, compatible_type
from mithril_ggml.weights.packed_weights import PackedArray, pack, unpack
from mithril_ggml.weights.quantize_recipe import QuantizationRecipe
from mithril_gguf.formats import BY_CODE
from mithril_gguf.matrix import BlockMatrix
from mithril_gguf.reader import MAX_NAME, PLAIN, GGUFFile, StoredTensor
from mithril_gguf.writer import QUANTIZATION_VERSION, stored_tensor, write_gguf

Array = np.ndarray[Any, Any]


# Tensors that llama.cpp adds to others, or compares, as they are in the file: they stay floats.
FLOATS = ("position_embd.weight", "token_types.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")


class FileTensor:
    """A tensor of a file, which NumPy converts to float32 when it is used."""

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored
        self.shape = stored.shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.floats(), dtype)

    def part(self, index: tuple[int | None, ...]) -> FileTensor:
        """Return the part at this index of the first axes; None is a new axis of size 1."""
        t = self.stored
        shape, data = t.shape, t.data
        for i in index:
            if i is None:
                shape = (1, *shape)
            else:
                data, shape = data.reshape(shape[0], -1)[i], shape[1:]
        return FileTensor(StoredTensor(t.name, shape, t.code, data))

    def floats(self) -> Array:
        """Return the elements as float32."""
        t = self.stored
        if t.code in PLAIN:
            return t.plain.astype(np.float32, copy=False)
        rows = int(np.prod(t.shape[:-1]))
        return unpack(t.data, by_code()[t.code], (rows, t.shape[-1])).reshape(t.shape)

    def blocks(self, order: Array | None) -> BlockMatrix | None:
        """Return the matrix as it is in the file, with its rows in this order, for other backends than GGML."""
        t = self.stored
        kind = BY_CODE.get(t.code)
        if kind is None or len(t.shape) != 2:
            return None
        return BlockMatrix(t.data.reshape(t.shape[0], -1), kind, t.shape, order)

    def packed(self, order: Array | None) -> PackedArray:
        """Return the matrix as it is in the file, with its rows in this order."""
        kind, (rows, width) = by_code()[self.stored.code], self.shape
        data = self.stored.data.reshape(rows, kind.row(width))
        if order is None:
            return PackedArray(data, kind, (rows, width))
        return PackedArray(data[order], kind, (rows, width), source=lambda: data[order])


def load_architecture(
    file: GGUFFile,
    backend: Backend | type[Backend] | str | None,
    context: int | None,
    options: Mapping[str, Any],
) -> CompiledModel:
    """Return the model of a file with bound parameters: on GGML the quantized matrices as they are in the file."""
    model, parts = _read(file, context)
    settings = resolve_options(dict(options))
    runner: Backend = GGMLBackend() if backend is None else make_backend(backend, settings)
    matrices: dict[str, PackedArray | BlockMatrix | Array] = {}
    if isinstance(runner, GGMLBackend):
        for parameter, (tensor, order, offset) in parts.items():
            if len(tensor.shape) == 2 and tensor.stored.code != 0 and not offset:
                matrices[parameter] = tensor.packed(order)
        kinds = {p: matrix.kind for p, matrix in matrices.items() if isinstance(matrix, PackedArray)}
        runner.recipe = QuantizationRecipe(None, exact=kinds)
    elif settings["static_inference"]:
        for parameter, (tensor, order, offset) in parts.items():
            blocks = tensor.blocks(order)
            if blocks is not None and not offset and runner.reading_quantized(blocks) is not None:
                matrices[parameter] = blocks
    for parameter, (tensor, order, offset) in parts.items():
        if parameter not in matrices:
            matrices[parameter] = _floats(tensor, order, offset)
    if settings["static_inference"] and not isinstance(runner, GGMLBackend):
        model.pretrained = matrices  # bound when the sizes of the inputs are known
        return compile(model, runner, inference=True, **options)
    arrays = {p: x if isinstance(x, PackedArray) else runner.array(x) for p, x in matrices.items()}
    return compile(model, runner, inference=True, **options).bind(arrays)


def model_of_architecture(file: GGUFFile) -> Any:
    """Return the model of a file with its parameters as float32."""
    model, parts = _read(file, None)
    model.pretrained = {parameter: _floats(*part) for parameter, part in parts.items()}
    return model


def _read(file: GGUFFile, context: int | None) -> tuple[Any, dict[str, tuple[FileTensor, Array | None, float]]]:
    """Return the model of a file, and the tensor, the order of its rows and an offset of each parameter."""
    function = plugins.load_architecture(file.text("general.architecture"), "loads")
    tensors = {n: FileTensor(t) for n, t in file.tensors.items()}
    try:
        model, sources = function(file.metadata, tensors, context=context)
    except InputError as error:
        raise error.with_facts(f"in '{file.path}'") from None
    return model, {p: (tensors[name].part(index), order, offset) for p, (name, order, offset, index) in sources.items()}


def _floats(tensor: FileTensor, order: Array | None, offset: float) -> Array:
    array = tensor.floats()
    array = array if order is None else array[order]
    return array + np.float32(offset) if offset else array


def export_architecture(
    compiled: Any, path: str | os.PathLike[str], name: str, parameters: Mapping[str, Any], recipe: QuantizationRecipe
) -> None:
    """Write a model in the layout of its family; only matrices are quantized."""
    function = plugins.load_architecture(name, "saves")
    architecture, metadata, sources, extra = function(compiled.model)
    if architecture != name:
        raise InputError(f"this model is a '{architecture}', no '{name}'", hint=f'architecture="{architecture}"')
    if hasattr(compiled.model, "checkpoint_parameters"):  # the model has them in another form
        parameters = compiled.model.checkpoint_parameters(parameters)
    tensors: list[StoredTensor] = []
    stacked: dict[str, dict[tuple[int, ...], Array]] = {}  # parts of a tensor
    kinds: dict[str, QuantType | None] = {}
    for parameter, (tensor, order, offset, index) in sources.items():
        array = np.asarray(compiled.backend.to_numpy(parameters[parameter]), np.float32)
        array = array + np.float32(offset) if offset else array
        array = array if order is None else array[order]
        kind = None if tensor.endswith(FLOATS) else recipe.requested_type(parameter)
        if index:
            stacked.setdefault(tensor, {})[index] = array
            kinds[tensor] = kind
        else:
            tensors.append(_stored(tensor, array, kind))
    for tensor, arrays in stacked.items():
        tensors.append(_stored(tensor, np.stack([arrays[index] for index in sorted(arrays)]), kinds[tensor]))
    tensors += [stored_tensor(tensor, array) for tensor, array in extra.items()]
    entries = {
        "general.architecture": architecture,
        "general.name": compiled.name,
        "general.quantization_version": QUANTIZATION_VERSION,
        **{key: _narrow(value) for key, value in metadata.items()},
    }
    entries.setdefault("tokenizer.ggml.model", "none")  # llama.cpp then evaluates numbers of tokens
    target = Path(os.fspath(path))
    with files.parts(target) as folder:
        write_gguf(folder / "part", entries, tensors)
        files.move(folder / "part", target)


def _stored(tensor: str, array: Array, kind: QuantType | None) -> StoredTensor:
    if len(tensor) > MAX_NAME:
        raise InputError(f"the name '{tensor}' is too long for a GGUF file")
    if kind is None or array.ndim < 2:
        return stored_tensor(tensor, array)
    rows = array.reshape(-1, array.shape[-1])
    packed = pack(rows, compatible_type(kind, array.shape[-1]), name=f"'{tensor}'")
    return StoredTensor(tensor, array.shape, packed.kind.code, packed.data)


def _narrow(value: Any) -> Any:
    """Return a value whose numbers have 32 bits, as llama.cpp reads them."""
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, list):
        return [_narrow(x) if isinstance(x, float) else np.int32(x) if isinstance(x, int) else x for x in value]
    return np.uint32(value) if isinstance(value, int) else np.float32(value)
