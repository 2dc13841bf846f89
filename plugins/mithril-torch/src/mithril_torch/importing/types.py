"""Comparison of each imported node with the shape and dtype that PyTorch recorded for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mithril.graph import Dim, UnsupportedError, Value, substitute, symbols
from mithril_importing.complex_numbers import Complex
from mithril_importing.declared_types import other_type, type_text
from mithril_torch.importing.complex_numbers import Part, part_type
from mithril_torch.importing.table import dtype_name, is_tensor


def example_size(size: Any) -> int | None:
    """Return a size of PyTorch in the example, or None if it depends on data."""
    return size if isinstance(size, int) else size.node.hint


class ExampleSizes:
    """The sizes of the example by the symbols of a graph; comparisons of open sizes use them."""

    def __init__(self, graph: torch.fx.Graph, values: Mapping[str, Any]) -> None:
        self.by_name: dict[str, int] = {}
        self.has_other_sizes = False  # whether the model is compiled for sizes that the example does not have
        for node in graph.nodes:
            if node.op == "placeholder" and isinstance(values.get(node.name), Value):
                for size, example in zip(
                    values[node.name].shape, node.meta["val"].shape, strict=False
                ):  # complex: one more
                    self._add(size, example_size(example))

    def _add(self, size: Any, example: int | None) -> None:
        if isinstance(size, Dim) and size.symbol is not None and example is not None:
            example = self.by_name.setdefault(size.symbol.name, example)
        self.has_other_sizes |= substitute(size, self.by_name) != example

    def agree(self, size: Any, recorded: Any) -> bool:
        """Whether a size of the graph can be the one that PyTorch recorded."""
        example = example_size(recorded)
        if example is None or (self.has_other_sizes and not isinstance(recorded, int)):
            return True
        if any(s.name not in self.by_name for s in symbols(size)) or (self.has_other_sizes and symbols(size)):
            return True
        return bool(substitute(size, self.by_name) == example)


def require_recorded_type(name: str, value: Any, recorded: Any, sizes: ExampleSizes) -> None:
    """Raise UnsupportedError if the result of an operator has another shape or dtype than in PyTorch."""
    if isinstance(recorded, (tuple, list)) and isinstance(value, (tuple, list)):
        for k, (part, its_type) in enumerate(zip(value, recorded, strict=False)):
            if part is not None:  # an error if another operator reads it
                require_recorded_type(f"result {k} of {name}", part, its_type, sizes)
        return
    if not isinstance(recorded, (torch.Tensor, Part)):
        return
    if isinstance(value, Complex) and recorded.dtype.is_complex:
        for part in (value.re, value.im):
            require_recorded_type(name, part, part_type(recorded), sizes)
        return
    kind = dtype_name(recorded.dtype)
    expected = type_text(kind, recorded.shape)
    if not is_tensor(value):
        raise UnsupportedError(f"{name} is not computed", facts=[f"in PyTorch it is {expected}"])
    actual = other_type(value, kind, recorded.shape, sizes.agree)
    if actual is not None:
        raise UnsupportedError(
            f"{name} becomes {actual}, but in PyTorch it is {expected}",
            hint="ml.from_torch(..., operators=) supplies another function; if the function is that of mithril, "
            "please report this error",
        )
