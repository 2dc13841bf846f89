"""Which weights are packed into which kind: what the user asked for, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from mithril.base.errors import OptionError
from mithril_ggml.library.quant_types import Kind, kind


@dataclass(frozen=True)
class Recipe:
    """Patterns of parameter names with kinds, the first that matches counts; ``default`` for the others."""

    default: Kind | None
    rules: tuple[tuple[str, Kind | None], ...] = ()
    exact: Mapping[str, Kind] = field(default_factory=dict)  # by name, before any pattern: what a file holds

    @classmethod
    def of(cls, given: str | Mapping[str, str | None] | Recipe | None) -> Recipe | None:
        """From what a user writes: a name, or ``{"decoder.*": "q6_k", "*.head": None, "*": "q4_k"}``."""
        if given is None or isinstance(given, Recipe):
            return given
        if isinstance(given, str):
            return cls(kind(given))
        if not isinstance(given, Mapping):
            raise OptionError(
                f"quantize={given!r} is neither the name of a kind nor patterns of parameters with kinds",
                hint='quantize="q8_0", or quantize={"*.head": None, "*": "q4_k"}',
            )
        rules = tuple((str(p), None if k is None else kind(k)) for p, k in given.items() if p != "*")
        rest = given.get("*")
        return cls(None if rest is None else kind(rest), rules)

    def wanted(self, name: str) -> Kind | None:
        """The kind asked for a parameter."""
        if name in self.exact:
            return self.exact[name]
        for pattern, chosen in self.rules:
            if fnmatchcase(name, pattern):
                return chosen
        return self.default

    def __str__(self) -> str:
        rules = [f"{p}: {k or 'f32'}" for p, k in self.rules]
        return ", ".join([*rules, str(self.default or "f32")])


def ternary_kind(elements: int) -> Kind:
    """What holds weights of three values without loss: 2 bits where rows are whole blocks, else 8."""
    small = kind("tq2_0")
    for found in (small, kind("q8_0"), kind("f16")):
        if found.fits(elements):
            return found
    raise AssertionError("16-bit floats hold rows of any length")
