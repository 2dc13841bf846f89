"""``quantization=`` of ``ml.compile``: dtypes of weights and activations, ranges, layers that stay in float."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mithril.backend import matches
from mithril.base import OptionError, unknown
from mithril_passes.quantization.ranges import Ranges

ACTIVATIONS = ("uint8", "int8", "dynamic")
WEIGHTS = ("int8",)


@dataclass(frozen=True)
class Setting:
    """A checked ``quantization=``."""

    ranges: Ranges | None
    activations: str = "uint8"
    per_channel: bool = True
    keep: tuple[str, ...] = ()
    observe: Callable[..., None] | None = None  # takes the graph and the values to calibrate

    @staticmethod
    def of(setting: Mapping[str, Any]) -> Setting:
        values = dict(setting)
        ranges = values.get("ranges")
        if ranges is not None and not isinstance(ranges, Ranges):
            ranges = Ranges.load(ranges)
        activations = str(values.get("activations", "uint8" if ranges is not None else "dynamic"))
        for key, value, accepted in (
            ("activations", activations, ACTIVATIONS),
            ("weights", values.get("weights", "int8"), WEIGHTS),
        ):
            if value not in accepted:
                message, facts, hint = unknown(f"dtype of {key} in quantization", str(value), accepted)
                raise OptionError(message, facts=facts, hint=hint)
        if activations != "dynamic" and ranges is None and "observe" not in values:
            raise OptionError(
                f"quantization: activations '{activations}' need ranges",
                hint="pass 'ranges': ml.calibrate_ranges(compiled, batches), or 'activations': 'dynamic'",
            )
        keep = values.get("keep", ())
        keep = (keep,) if isinstance(keep, str) else tuple(keep)
        return Setting(ranges, activations, bool(values.get("per_channel", True)), keep, values.get("observe"))

    def keeps(self, path: str) -> bool:
        """Whether a layer stays in float by the user's choice."""
        return any(matches(path, pattern) for pattern in self.keep)
