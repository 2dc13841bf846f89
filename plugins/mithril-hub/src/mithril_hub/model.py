"""A pretrained decoder as a layer that brings its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mithril.models import Layer
from mithril_hub.decoder.config import DecoderConfig
from mithril_hub.decoder.decoder import decode
from mithril_hub.decoder.places import Places


class Decoder(Layer):
    """A decoder language model: ``input_ids`` [batch, length] to ``logits`` [batch, length, vocabulary].

    Without ``cache``, the optional input ``attention_mask`` [batch, length] marks padding by 0. With ``cache=n``, keys
    and values of n positions are states; ``position`` is the position of the first token, [] or one per row, and the
    optional input ``last`` [batch] selects one token of each row, whose logits are [batch, 1, vocabulary].
    """

    inputs: tuple[str, ...] = ("input_ids",)
    optional: tuple[str, ...] = ("attention_mask",)
    outputs = ("logits",)

    def __init__(
        self,
        config: DecoderConfig,
        *,
        cache: int | None = None,
        dtype: str = "float32",
        weights: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.cache = cache
        self.dtype = dtype
        self.weights_by_name = {} if weights is None else weights
        if cache:
            self.inputs, self.optional = ("input_ids", "position"), ("last",)

    def pretrained(self) -> Mapping[str, Any]:
        """Return the arrays of the checkpoint by parameter name."""
        return self.weights_by_name

    def expects(self, terminal: str) -> Any:
        if terminal == "input_ids":
            return (None, None), "int32"
        return None

    def build(self, tokens: Any, *others: Any) -> Any:
        position, last = others if self.cache else (None, None)
        mask = None if self.cache else others[0]
        places = Places.of(tokens, position, self.cache, mask, "Decoder")
        return decode(self, self.config, tokens, places, last, self.dtype)
