"""``quantization=`` of ``ml.compile``: dtypes of weights and activations, ranges, layers that stay in float."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mithril.backend import covers
from mithril.graph import OptionError, unknown
from mithril_passes.quantization.groups import CODEBOOKS, GROUPS
from mithril_passes.quantization.ranges import Ranges

ACTIVATIONS = ("uint8", "int8", "dynamic")
GROUP_ACTIVATIONS = ("float32", "bfloat16", "dynamic")  # with 4-bit weights
STORED = "stored"  # weights that are quantized values of a file stay so, others stay float32
WEIGHTS = ("int8", *CODEBOOKS, STORED)


@dataclass(frozen=True)
class Setting:
    """A checked ``quantization=``."""

    ranges: Ranges | None
    activations: str = "uint8"
    per_channel: bool = True
    weights: str = "int8"
    group: int = GROUPS[0]
    keep: tuple[str, ...] = ()
    observe: Callable[..., None] | None = None  # takes the graph and the values to calibrate

    @staticmethod
    def of(setting: Mapping[str, Any]) -> Setting:
        values = dict(setting)
        ranges = values.get("ranges")
        if ranges is not None and not isinstance(ranges, Ranges):
            ranges = Ranges.load(ranges)
        weights = values.get("weights", "int8")
        by_group = weights in CODEBOOKS or weights == STORED
        default = GROUP_ACTIVATIONS[0] if by_group else "uint8" if ranges is not None else "dynamic"
        activations, group = str(values.get("activations", default)), values.get("group", GROUPS[0])
        for key, value, accepted in (
            ("weights", weights, WEIGHTS),
            ("activations", activations, GROUP_ACTIVATIONS if by_group else ACTIVATIONS),
        ):
            if value not in accepted:
                message, facts, hint = unknown(f"dtype of {key} in quantization", str(value), accepted)
                raise OptionError(message, facts=facts, hint=hint)
        if "group" in values and (weights not in CODEBOOKS or group not in GROUPS):
            expected = f"sizes of groups of 4-bit weights: {', '.join(map(str, GROUPS))}"
            raise OptionError(f"quantization: group={group!r} of {weights} weights", facts=[expected])
        if by_group and "per_channel" in values:
            raise OptionError(
                f"quantization: per_channel does not go with {weights} weights, whose groups have scales of their own",
                hint="remove per_channel, or pass 'weights': 'int8'",
            )
        if not by_group and activations != "dynamic" and ranges is None and "observe" not in values:
            raise OptionError(
                f"quantization: activations '{activations}' need ranges",
                hint="pass 'ranges': ml.calibrate_ranges(compiled, batches), or 'activations': 'dynamic'",
            )
        keep = values.get("keep", ())
        keep = (keep,) if isinstance(keep, str) else tuple(keep)
        per_channel = bool(values.get("per_channel", True))
        return Setting(ranges, activations, per_channel, weights, group, keep, values.get("observe"))

    @property
    def by_group(self) -> bool:
        """Whether weights are quantized values in groups."""
        return self.weights in CODEBOOKS or self.weights == STORED

    def keeps(self, path: str) -> bool:
        """Whether a layer stays in float by the user's choice."""
        return any(covers(pattern, path) for pattern in self.keep)
