"""Modules of a source whose operations are those of a layer of mithril."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mithril import ops
from mithril.models import Conv1d, Conv2d, Conv3d, Embedding, Layer, LayerNorm, Linear
from mithril_importing.regions import Operation, Param, Read, Region

Shapes = Mapping[str, tuple[int, ...]]
CONVOLUTIONS: Mapping[str, Any] = {"conv1d": Conv1d, "conv2d": Conv2d, "conv3d": Conv3d}


@dataclass(frozen=True)
class Match:
    """A layer that computes the operations of a region, and the arguments of its constructor."""

    layer: Callable[..., Layer]
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def create(self) -> Layer:
        return self.layer(*self.arguments, **dict(self.options))


class NamedLinear(Linear):
    """A linear layer whose parameters have the names of the source."""

    def __init__(
        self, inputs: int, outputs: int, weight_name: str, bias_name: str | None, *, input_major: bool = False
    ) -> None:
        super().__init__(inputs, outputs, bias=bias_name is not None)
        self.weight_name, self.bias_name, self.input_major = weight_name, bias_name, input_major

    def build(self, x: Any) -> Any:
        sizes = (self.in_features, self.out_features)
        w = self.param(self.weight_name, sizes if self.input_major else sizes[::-1])
        b = None if self.bias_name is None else self.param(self.bias_name, sizes[1:])
        if not self.input_major:
            return ops.linear(x, w, b)
        y = ops.matmul(x, w)
        return y if b is None else y + b


class TypedEmbedding(Embedding):
    """An embedding whose table has the dtype of the source; others take it from their float inputs."""

    def __init__(self, vocabulary: int, size: int, dtype: str) -> None:
        super().__init__(vocabulary, size)
        self.dtype = dtype

    def build(self, indices: Any) -> Any:
        return ops.embedding(indices, self.param("weight", (self.vocabulary, self.size), dtype=self.dtype))


def known_layer(
    shapes: Shapes, dtypes: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str, Sequence[Region]], Layer | None]:
    """Return a function that returns the layer of all regions of a module, or None if they have no known pattern.

    ``shapes`` and ``dtypes`` are those of the parameters by their names in the source; dtypes default to float32.
    """

    def known(path: str, regions: Sequence[Region]) -> Layer | None:
        # Training and inference, or several calls, are one layer only if they are the same one.
        matches = {_match(path, region, shapes, dtypes) for region in regions}
        match = matches.pop() if len(matches) == 1 else None
        return None if match is None else match.create()

    return known


def _match(path: str, region: Region, shapes: Shapes, dtypes: Mapping[str, str]) -> Match | None:
    operations = _without_broadcasts(list(region.operations()))
    # Adapters and replacements call a layer with one value; others would need the terminals of the source.
    if len(region.reads) != 1 or len(region.results) != 1:
        return None
    if [o.kind for o in operations] == ["matmul", "add"]:
        product, added = operations
        x, w = product.operands
        bias = [p for p in added.operands if isinstance(p, Param)]
        if len(bias) != 1 or Read(product.results[0]) not in added.operands:
            return None
        return _linear(path, x, w, bias[0], shapes, input_major=True)
    if len(operations) != 1:
        return None
    operation = operations[0]
    operands = operation.operands
    if operation.kind == "matmul":
        x, w = operands
        return _linear(path, x, w, None, shapes, input_major=True)
    if operation.kind == "linear":
        x, w, b = (*operands, None)[:3]
        return _linear(path, x, w, b, shapes)
    if operation.kind == "embedding" and len(operands) == 2 and operands[0] == Param(f"{path}.weight"):
        table = f"{path}.weight"
        dtype = dtypes.get(table, "float32")
        return Match(Embedding, shapes[table]) if dtype == "float32" else Match(TypedEmbedding, (*shapes[table], dtype))
    if operation.kind == "layer_norm":
        return _layer_norm(path, *operands, shapes=shapes)
    if operation.kind in CONVOLUTIONS:
        return _convolution(path, CONVOLUTIONS[operation.kind], *operands, shapes=shapes)
    return None


def _without_broadcasts(operations: list[Operation]) -> list[Operation]:
    """Leave out broadcasts of parameters: other operations read the parameter itself."""
    names = {Read(o.results[0]): o.operands[0] for o in operations if o.kind == "broadcast"}
    aliases = {read: operand for read, operand in names.items() if isinstance(operand, Param)}
    return [
        replace(o, operands=tuple(aliases.get(x, x) for x in o.operands))
        for o in operations
        if not (o.kind == "broadcast" and isinstance(o.operands[0], Param))
    ]


def _linear(path: str, x: Any, w: Any, b: Any, shapes: Shapes, *, input_major: bool = False) -> Match | None:
    if not isinstance(x, Read) or not _is_own(path, w) or not (b is None or _is_own(path, b)):
        return None
    shape = shapes[w.name]
    outputs = shape[-1] if input_major else shape[0]
    if len(shape) != 2 or (b is not None and shapes[b.name] != (outputs,)):
        return None
    inputs = shape[0] if input_major else shape[-1]
    names = [None if p is None else p.name[len(path) + 1 :] for p in (w, b)]
    if names[0] == "weight" and names[1] in ("bias", None) and not input_major:
        return Match(Linear, (inputs, outputs), (("bias", b is not None),))
    return Match(NamedLinear, (inputs, outputs, *names), (("input_major", input_major),))


def _is_own(path: str, operand: Any) -> bool:
    """Whether an operand is a parameter directly in a module."""
    return isinstance(operand, Param) and operand.name.rpartition(".")[0] == path


def _layer_norm(
    path: str, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *rest: Any, shapes: Shapes
) -> Match | None:
    if not isinstance(x, Read) or any(
        p is not None and p != Param(f"{path}.{name}") for name, p in (("weight", weight), ("bias", bias))
    ):
        return None
    options = (("eps", eps), ("scale", weight is not None), ("bias", bias is not None))
    return Match(LayerNorm, (tuple(shape),), options)


def _convolution(
    path: str,
    kind: Any,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    shapes: Shapes,
) -> Match | None:
    if not isinstance(x, Read) or weight != Param(f"{path}.weight") or bias not in (None, Param(f"{path}.bias")):
        return None
    if isinstance(padding, str):  # PyTorch's "same", whose sides may differ
        return None
    out, per_group, *kernel = shapes[weight.name]
    numbers = [("kernel_size", kernel), ("stride", stride), ("padding", padding), ("dilation", dilation)]
    options = [(n, v if isinstance(v, int) else _one_or_all(v)) for n, v in numbers]
    return Match(kind, (per_group * groups, out), (*options, ("groups", groups), ("bias", bias is not None)))


def _one_or_all(numbers: Sequence[int]) -> int | tuple[int, ...]:
    """Return one number for all axes."""
    return numbers[0] if len(set(numbers)) == 1 else tuple(numbers)
