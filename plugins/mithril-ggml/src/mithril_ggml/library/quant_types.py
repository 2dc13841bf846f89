"""Storage types of tensors: dtypes and quantized types, their codes in ggml, and their sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from mithril.graph import DType, OptionError, unknown
from mithril_ggml.library.library import ggml

# How ggml stores a dtype: by width. It computes with float32 only; everything else is only kept and moved by it.
STORED: Mapping[str, int] = {
    "float32": ggml.GGML_TYPE_F32,
    "float16": ggml.GGML_TYPE_F16,
    "bfloat16": ggml.GGML_TYPE_BF16,
    "float64": ggml.GGML_TYPE_F64,
    "bool": ggml.GGML_TYPE_I8,
    "int8": ggml.GGML_TYPE_I8,
    "uint8": ggml.GGML_TYPE_I8,
    "int16": ggml.GGML_TYPE_I16,
    "uint16": ggml.GGML_TYPE_I16,
    "int32": ggml.GGML_TYPE_I32,
    "uint32": ggml.GGML_TYPE_I32,
    "int64": ggml.GGML_TYPE_I64,
    "uint64": ggml.GGML_TYPE_I64,
}


def stored(dtype: DType) -> int:
    return STORED[dtype.name]


@dataclass(frozen=True)
class QuantType:
    """A type that weights may have: ``block`` elements take ``bytes``."""

    name: str
    code: int
    block: int
    bytes: int

    def row(self, elements: int) -> int:
        """Return the bytes of a row of `elements`."""
        return elements // self.block * self.bytes

    def fits(self, elements: int) -> bool:
        return elements % self.block == 0

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.bytes / self.block

    def __str__(self) -> str:
        return self.name


_NAMES = ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0", "q3_k", "q2_k",
          "iq4_nl", "iq4_xs", "mxfp4", "tq2_0", "tq1_0")  # fmt: skip
ALIASES = {"int8": "q8_0", "int4": "q4_0", "float16": "f16", "bfloat16": "bf16", "float32": "f32", "ternary": "tq2_0"}


@cache
def kinds() -> dict[str, QuantType]:
    """Return all types by name, from the most exact to the smallest of each family."""
    types_by_name = {}
    for name in _NAMES:
        code = getattr(ggml, f"GGML_TYPE_{name.upper()}")
        types_by_name[name] = QuantType(name, code, ggml.ggml_blck_size(code), ggml.ggml_type_size(code))
    return types_by_name


@cache
def by_code() -> dict[int, QuantType]:
    return {k.code: k for k in kinds().values()}


def kind(name: str) -> QuantType:
    """Return the type with a name or alias."""
    plain = name.lower() if isinstance(name, str) else str(name)
    quant_type = kinds().get(ALIASES.get(plain, plain))
    if quant_type is None:
        message, facts, hint = unknown("quantization", str(name), [*kinds(), *ALIASES])
        raise OptionError(message, facts=facts, hint=hint)
    return quant_type


# Alternatives if a row is not a multiple of the block: smaller blocks with about as many bits, then 16 bits.
_SMALLER = {
    "q6_k": "q8_0",
    "q5_k": "q5_0",
    "q4_k": "q4_0",
    "iq4_xs": "iq4_nl",
    "q3_k": "q4_0",
    "q2_k": "q4_0",
    "tq1_0": "q4_0",
    "tq2_0": "q4_0",
}


def compatible_type(requested: QuantType, elements: int) -> QuantType:
    """Return the requested type, or the next alternative whose block divides `elements`."""
    candidate = requested
    while not candidate.fits(elements):
        candidate = kinds()[_SMALLER.get(candidate.name, "f16")]
    return candidate
