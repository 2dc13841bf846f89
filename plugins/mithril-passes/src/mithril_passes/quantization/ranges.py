"""``Ranges``: the ranges of a model's activations, printable and saved as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from mithril.backend import CheckedType
from mithril.graph import InputError, parsed_json
from mithril.system import files

Range = tuple[float, float]


@dataclass(frozen=True)
class Ranges(metaclass=CheckedType):
    """Lowest and highest number of each activation that a quantized layer reads, by the name of its value.

    ``errors`` has the error of the model's results if only that layer is quantized; ``keep`` the layers that stay in
    float for an error below ``bound``.
    """

    values: Mapping[str, Range]
    method: str = "minmax"
    rows: int = 0
    errors: Mapping[str, float] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    bound: float | None = None

    def __str__(self) -> str:
        lines = [f"{len(self.values)} ranges from {self.rows} rows by {self.method}"]
        width = max(map(len, self.values), default=0)
        lines += [f"  {name.ljust(width)}  {low:12.5g} {high:12.5g}" for name, (low, high) in self.values.items()]
        for layer, error in sorted(self.errors.items(), key=lambda item: -item[1]):
            note = "  stays float" if layer in self.keep else ""
            lines.append(f"  layer {layer}: error {error:.3%}{note}")
        lines += [f"  layer {layer}: stays float" for layer in self.keep if layer not in self.errors]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ranges as JSON."""
        content = {
            "values": {name: list(pair) for name, pair in self.values.items()},
            "method": self.method,
            "rows": self.rows,
            "errors": dict(self.errors),
            "keep": list(self.keep),
            "bound": self.bound,
        }
        files.write(path, json.dumps(content, indent=1) + "\n", "path of the ranges")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Ranges:
        """Read the JSON that ``save`` writes."""
        try:
            with open(path, encoding="utf-8") as file:
                content = parsed_json(file.read(), "the content")
            values = {str(name): (float(low), float(high)) for name, (low, high) in content["values"].items()}
            return Ranges(
                values,
                str(content["method"]),
                int(content["rows"]),
                {str(n): float(x) for n, x in content["errors"].items()},
                tuple(map(str, content["keep"])),
                None if content["bound"] is None else float(content["bound"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
            raise InputError(
                f"'{os.fspath(path)}' has no ranges: {cause}",
                hint="write it by ml.calibrate_ranges(compiled, batches).save(path)",
            ) from cause
