"""Reading of ONNX files: the model, its tensors by name, its functions, its operator sets."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from mithril.graph import Dim, InputError, MithrilError, Size, UnsupportedError, check_memory, parse_dim
from mithril.system import files
from mithril_importing.names import identifier
from mithril_onnx.mapped import IrregularError, without_large_tensors
from mithril_onnx.message_memory import check_messages
from mithril_onnx.table import canonical_domain
from mithril_onnx.tensors import dtype_of_code, to_array

# Files of the first version of ONNX name no opset.
OLDEST = 1


class OnnxFile:
    """A model as read from a file, never changed; ``mapped`` has bytes of tensors that ``proto`` lacks, by name."""

    def __init__(
        self, proto: Any, folder: str | None, name: str, mapped: Mapping[str, np.ndarray[Any, Any]] | None = None
    ) -> None:
        self.mapped = mapped or {}
        self.proto = proto
        self.folder = folder
        self.name = name
        self.opsets = {canonical_domain(o.domain): o.version for o in proto.opset_import}
        self.opset = self.opsets.get("", 0) or max([OLDEST, *self.opsets.values()])
        self.functions = {(canonical_domain(f.domain), f.name, getattr(f, "overload", "")): f for f in proto.functions}
        if not proto.HasField("graph"):
            raise InputError(f"'{name}' contains no graph", hint="pass a file that onnx.checker.check_model accepts")
        if "" in self.opsets and self.opset < OLDEST:
            raise UnsupportedError(
                f"'{name}' has opset {self.opset}",
                facts=[f"accepted: {OLDEST} and later"],
                hint="convert it: onnx.version_converter.convert_version(model, 13)",
            )

    def __deepcopy__(self, memo: Any) -> OnnxFile:
        return self

    @cached_property
    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The initializers by name."""
        left = dict(self.mapped)  # of tensors of one name only the first is mapped, and the last one counts
        out = {t.name: to_array(t, self.folder, left.pop(t.name, None)) for t in self.proto.graph.initializer}
        sparse_tensors = self.proto.graph.sparse_initializer
        check_memory(sum(map(dense_bytes, sparse_tensors)), self.size, f"the sparse tensors of '{self.name}'")
        for sparse in sparse_tensors:
            out[sparse.values.name] = dense(sparse, self.folder)
        return out

    @cached_property
    def size(self) -> int:
        """The bytes of the file and of its external data."""
        external = [t for t in self.proto.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
        mapped = [*self.mapped.values(), *(to_array(t, self.folder) for t in external)]
        return int(self.proto.ByteSize() + sum(x.nbytes for x in mapped))

    @cached_property
    def has_open_sizes(self) -> bool:
        """Whether the size of an input is not declared."""
        shapes = [declared_shape(i.type.tensor_type, i.name) for i in self.proto.graph.input]
        return any(shape is None or any(type(d) is not int for d in shape) for shape in shapes)

    @cached_property
    def digest(self) -> str:
        """A hash of the graph, and of the data of its tensors or their place on disk; mapped tensors are not in it."""
        h = hashlib.sha256(self.proto.SerializeToString(deterministic=True))
        for t in self.proto.graph.initializer:
            if t.data_location == onnx.TensorProto.EXTERNAL and self.folder is not None:
                for e in t.external_data:
                    if e.key == "location":
                        stat = files.inside(self.folder, e.value).stat()
                        h.update(f"{e.value} {stat.st_size} {stat.st_mtime_ns}".encode())
        return h.hexdigest()


def read(source: Any) -> OnnxFile:
    """Return a model from a path, bytes or an ``onnx.ModelProto``."""
    if isinstance(source, onnx.ModelProto):
        return OnnxFile(source, None, source.graph.name or "model")
    if isinstance(source, bytes):
        return OnnxFile(_parsed(source, len(source), "the ONNX model"), None, "model")
    if not isinstance(source, (str, os.PathLike)):
        raise InputError(
            f"an ONNX model cannot be a {type(source).__name__}", facts=["accepted: a path, bytes, an onnx.ModelProto"]
        )
    path = os.fspath(source)
    if not os.path.isfile(path):
        raise InputError(f"there is no file '{path}'")
    content, mapped = without_large_tensors(path)
    folder, name = os.path.split(os.path.abspath(path))
    return OnnxFile(_parsed(content, os.path.getsize(path), f"'{path}'"), folder, name, mapped)


def _parsed(content: bytes, size: int, description: str) -> Any:
    proto = onnx.ModelProto()
    try:
        check_messages(content, size, description)
        proto.ParseFromString(content)
    except InputError:
        raise
    except (DecodeError, IrregularError, ValueError, RecursionError, UnicodeDecodeError) as cause:
        raise InputError(
            f"{description} is not an ONNX file, or is damaged", facts=[f"{type(cause).__name__}: {cause}"]
        ) from None
    if not proto.HasField("graph"):
        raise InputError(f"{description} is not an ONNX file, or is damaged", facts=["it contains no graph"])
    return proto


def dense(sparse: Any, folder: str | None) -> np.ndarray[Any, Any]:
    """Return a sparse tensor with all its elements."""
    values, indices, shape = to_array(sparse.values, folder), to_array(sparse.indices, folder), tuple(sparse.dims)
    out = np.zeros(shape, values.dtype)
    try:
        if indices.ndim == 2:
            out[tuple(indices.T)] = values
        else:
            out.reshape(-1)[indices] = values
    except (IndexError, ValueError) as cause:
        raise InputError(
            f"the sparse tensor '{sparse.values.name}' of the ONNX file is damaged", facts=[str(cause)]
        ) from None
    return out


def dense_bytes(sparse: Any) -> int:
    """Return the bytes of a sparse tensor with all its elements."""
    if any(n < 0 for n in sparse.dims):
        raise InputError(f"the sparse tensor '{sparse.values.name}' of the ONNX file is damaged")
    return int(math.prod(sparse.dims) * dtype_of_code(sparse.values.data_type).itemsize)


def declared_shape(tensor_type: Any, name: str) -> tuple[Size, ...] | None:
    """Return the declared shape of an input, with a symbol per named or unknown size; None for an unknown rank."""
    if not tensor_type.HasField("shape"):
        return None
    sizes: list[Size] = []
    for axis, d in enumerate(tensor_type.shape.dim):
        if d.HasField("dim_value") and d.dim_value != -1:  # PaddlePaddle writes -1 for an open size
            if d.dim_value < 0:
                raise InputError(f"axis {axis} of the input '{name}' has the size {d.dim_value}")
            sizes.append(d.dim_value)
        else:
            sizes.append(_symbol(d.dim_param) if d.dim_param else Dim(f"{identifier(name)}_{axis}"))
    return tuple(sizes)


def _symbol(text: str) -> Size:
    """Return the size that a ``dim_param`` names: a symbol, or arithmetic such as ``past + 1``."""
    try:
        return parse_dim(text) if re.search(r"[+*/%-]", text) and not re.search(r"[^\w+*/%() -]", text) else Dim(text)
    except MithrilError:
        return Dim(identifier(text) + "_")
