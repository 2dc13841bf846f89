"""Quantization recipe: name patterns of weights to quantized types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from mithril.graph import OptionError
from mithril_ggml.library.quant_types import QuantType, kind


@dataclass(frozen=True)
class QuantizationRecipe:
    """Patterns of parameter names with kinds, the first that matches counts; ``default`` for the others."""

    default: QuantType | None
    rules: tuple[tuple[str, QuantType | None], ...] = ()
    exact: Mapping[str, QuantType] = field(default_factory=dict)  # by name, before any pattern: the types in a file

    @classmethod
    def of(cls, setting: str | Mapping[str, str | None] | QuantizationRecipe | None) -> QuantizationRecipe | None:
        """Parse the user's setting: a name, or ``{"decoder.*": "q6_k", "*.head": None, "*": "q4_k"}``."""
        if setting is None or isinstance(setting, QuantizationRecipe):
            return setting
        if isinstance(setting, str):
            return cls(kind(setting))
        if not isinstance(setting, Mapping):
            raise OptionError(
                f"quantize={setting!r} is neither the name of a kind nor patterns of parameters with kinds",
                hint='quantize="q8_0", or quantize={"*.head": None, "*": "q4_k"}',
            )
        rules = tuple((str(p), None if k is None else kind(k)) for p, k in setting.items() if p != "*")
        rest = setting.get("*")
        return cls(None if rest is None else kind(rest), rules)

    def requested_type(self, name: str) -> QuantType | None:
        """Return the requested type of a parameter, or None."""
        if name in self.exact:
            return self.exact[name]
        for pattern, quant_type in self.rules:
            if fnmatchcase(name, pattern):
                return quant_type
        return self.default

    def __str__(self) -> str:
        rules = [f"{p}: {k or 'f32'}" for p, k in self.rules]
        return ", ".join([*rules, str(self.default or "f32")])


def ternary_kind(elements: int) -> QuantType:
    """Return the smallest lossless type for ternary weights: 2 bits if rows are multiples of the block, else 8."""
    small = kind("tq2_0")
    for candidate in (small, kind("q8_0"), kind("f16")):
        if candidate.fits(elements):
            return candidate
    raise AssertionError("16-bit floats hold rows of any length")
