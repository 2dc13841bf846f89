"""The base of pretrained networks that are functions of their inputs, driven by a frozen configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mithril import ops
from mithril.graph import TensorType, Value, dtype as as_dtype
from mithril_hub.model import IDS, Pretrained, parameter_types

MASKS = ("attention_mask", "token_type_ids")  # optional inputs of encoders
Types = Mapping[str, tuple[tuple[Any, ...], str]]  # shape and dtype by input


@dataclass(frozen=True)
class TextSettings:
    """The text that a decoder with an encoder generates: its first tokens, and the tokens that end it."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> TextSettings:
        """Return the tokens of a ``config.json``."""
        names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
        start = next((settings[n] for n in names if settings.get(n) is not None), None)
        stop = settings.get("eos_token_id")
        ends = stop if isinstance(stop, list) else [] if stop is None else [stop]
        return cls(() if start is None else (int(start),), tuple(int(t) for t in ends))


class Network(Pretrained):
    """A network whose ``compute`` returns one value per output.

    Files of models hold the arguments of its class, which determine the layers below: the constructor traces
    ``compute``, which creates them.
    """

    def __init__(
        self,
        config: Any,
        types: Types,
        outputs: tuple[str, ...],
        optional: tuple[str, ...],
        dtype: str,
        text: TextSettings | None = None,
    ) -> None:
        self.config = config
        self.types = dict(types)
        self.inputs = tuple(types)
        self.outputs = outputs
        self.optional = optional
        self.dtype = dtype
        self.text = text
        parameter_types(self)

    def compute(self, inputs: Mapping[str, Any]) -> Any:
        """Return the outputs for a value of each input, None for an optional one without."""
        raise NotImplementedError

    def example_types(self) -> Mapping[str, TensorType]:
        sizes = {name: tuple(1 if n is None else n for n in shape) for name, (shape, _) in self.types.items()}
        return {name: TensorType(as_dtype(kind), sizes[name]) for name, (_, kind) in self.types.items()}

    def expects(self, terminal: str) -> Any:
        return ((None, None), IDS) if terminal in MASKS else self.types.get(terminal)

    def build(self, *values: Any) -> Any:
        names = (*self.inputs, *self.optional)
        inputs = {
            name: ops.cast(x, dtype="int32") if isinstance(x, Value) and x.dtype.is_integer else x
            for name, x in zip(names, values, strict=True)
        }
        return self.compute(inputs)
